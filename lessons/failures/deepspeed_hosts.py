"""DeepSpeed's launcher and its machines

Run:    not here: it needs several machines
Text:   RuntimeError: launcher 'pdsh' not installed.
Text:   Unable to find hostfile, will proceed with training with local resources only.
Text:   ssh: connect to host node2 port 22: Connection refused
Text:   Host key verification failed.
Text:   pdsh@node1: node2: ssh exited with exit code 255
Cause:  The `deepspeed` command starts the other machines over ssh, by pdsh, and reads their names
        from /job/hostfile or `--hostfile`. pdsh is not installed, ssh asks for a password or does
        not get through, or there is no such file. The line about the missing hostfile is only a
        note on one machine.
Fix:    `ssh node2 hostname` must work without a question, from the first machine to each. `apt-get
        install pdsh`, or `--launcher openmpi`. Without ssh, start torchrun on each machine yourself
        (lesson 14): a DeepSpeed program runs in it as well.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeedExamples/issues/150
Source: https://github.com/deepspeedai/DeepSpeed/issues/841
"""
