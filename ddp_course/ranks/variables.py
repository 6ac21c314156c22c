"""The environment variables of the course, in one list. The first five are for people;
the others pass something on from one process to another.
"""

DATA = "DDP_COURSE_DATA"  # the folder with MNIST
START_METHOD = "DDP_COURSE_START_METHOD"  # how ranks start: "forkserver" or "spawn"
MACHINES = "DDP_COURSE_MACHINES"  # "pretended": machines without namespaces
NETWORK = "DDP_COURSE_NETWORK"  # the pretend network, in numbers: see links.py
SEED = "DDP_COURSE_SEED"  # of the checks' random choices

PRELOAD = "DDP_COURSE_PRELOAD"  # what the fork server imports: see preload.py
MACHINE = "DDP_COURSE_MACHINE"  # process 1 of a rank's machine
JOB = "DDP_COURSE_JOB"  # by which a job's processes are known
SHUT_IN = "DDP_COURSE_SHUT_IN"  # says that this is inside of a sandbox
SANDBOX = "DDP_COURSE_SANDBOX"  # the sandbox's settings, as JSON
VERDICT = "DDP_COURSE_VERDICT"  # the file for a verdict, in grading
PATIENCE = "DDP_COURSE_PATIENCE"  # a factor for the time limits of checks
