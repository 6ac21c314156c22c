# make lab opens the course, make test passes its tests. Both set everything up first, in .venv.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: lab setup lessons quick test rest mutants tries thorough grade exercises bench doctor engines site browser

lab: setup
	@$(BIN)/ddp-course lab

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else \
		"The course needs Python 3.11, 3.12 or 3.13, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@$(PYTHON) -c 'import os, shutil, sys; free = shutil.disk_usage(".").free / 1e9; \
		sys.exit(None if free > 7 or os.path.exists(".venv") or sys.platform != "linux" else \
		"The course needs 7 GB of disk, and 3 more while it installs: here %.1f GB are free." % free)'
	@echo "Installing the course into .venv: some minutes the first time, torch is large."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[deepspeed,test]"
	@$(BIN)/python -m ddp_course.cli.doctor pair
	@touch $@

lessons: setup
	@$(BIN)/ddp-course execute

# a part of `make test` that starts no ranks
quick: setup
	@DDP_COURSE_QUICK=1 $(BIN)/python -m pytest -n 2 -m "not dear"

# at most 720 CPU seconds: what is left out is in tests/dear.txt
test: setup
	@$(BIN)/python -m pytest -n 2 --dist load --maxschedchunk 1 -m "not dear"

# what `make test` leaves out
rest: setup
	@$(BIN)/python -m pytest -n 3 --dist load --maxschedchunk 1 -m dear

# all answers to an exercise that the tests know, in one process: EX=03, MORE="bucketed --made"
mutants: setup
	@PYTHONPATH=tests $(BIN)/python tests/judge_mutants.py $(EX) $(MORE)

# what a lesson asks to try, run as it says: LESSON=04, MORE="98bf8781" for one text of it
tries: setup
	@PYTHONPATH=tests $(BIN)/python -m tries $(LESSON) $(MORE)

thorough: setup
	@DDP_COURSE_THOROUGH=1 $(BIN)/python -m pytest -n 3 --dist load --maxschedchunk 1

# in a browser: every lesson in JupyterLab, or LESSONS=01,03,12, and every page of the site
browser: setup
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[browser]"
	@DDP_COURSE_LESSONS=$(LESSONS) $(BIN)/python -m pytest -n 0 --timeout=1800 tests/browser/in_jupyterlab.py tests/browser/on_the_site.py

SUBMISSION ?= $(firstword $(wildcard work/exercises) exercises)
grade: setup
	@$(BIN)/ddp-course grade $(SUBMISSION)

exercises: setup
	@$(BIN)/python -m ddp_course.cli.exercises

bench: setup
	@$(BIN)/python benchmarks/run.py

doctor: setup
	@$(BIN)/ddp-course doctor

site: setup
	@$(BIN)/python site/make.py

# Debian's packages for lesson 14: SLURM, ssh, Open MPI. RUNLEVEL=1: their services are not started.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
engines:
	@$(SUDO) apt-get update -qq
	@$(SUDO) env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		iproute2 util-linux slurmctld slurmd slurm-client openssh-server openssh-client pdsh openmpi-bin
