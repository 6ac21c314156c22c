"""Lesson 4's program on Ray Train, which replaces workers that die.

python clusters/ray/lesson04_on_ray.py --workers 2 --epochs 1
python clusters/ray/lesson04_on_ray.py --workers 2 --epochs 1 --lose-a-worker
python clusters/ray/lesson04_on_ray.py --workers 2 --epochs 1 --address node0:6379

It needs Ray: pip install -c constraints.txt -e ".[engines]". Without --address, it starts
a Ray of its own on this machine, which ends with it. With --address, it gives its work to
the Ray that `ray start --head` has started there: see two_machines.py.
"""

import importlib.util
import os
import secrets
import shutil
import socket
import sys
import tempfile
from contextlib import redirect_stdout

from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_course import UsageError, lesson04, runs
from ddp_course.ranks.environment import choose_device, torchrun_environment


def work(args):
    """What each worker does. Ray has made the process group, and has set the variables
    that torchrun sets. What the worker of rank 0 returns is the result.
    """
    rank, _, world_size, _ = torchrun_environment()
    diary = args.out / "workers.txt"  # on a disk that all machines see
    attempt = diary.read_text().count(f"rank {rank} ") + 1 if diary.exists() else 1
    with diary.open("a") as file:
        name = f"attempt {attempt}: rank {rank} of {world_size}"
        file.write(f"{name} on {socket.gethostname()}\n")
    if args.lose_a_worker and attempt == 1 and rank == world_size - 1:
        die_after_step(5)
    return lesson04.train(
        args,
        rank,
        world_size,
        choose_device(args.device, deterministic=args.deterministic),
    )


def die_after_step(last):
    """Let this process end in the middle of its training, without a word."""
    steps = iter(range(1, last))
    register_optimizer_step_post_hook(lambda *_: next(steps, None) or os._exit(13))


def trainer(args):
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    gpus = args.device == "cuda"
    return TorchTrainer(
        work,
        train_loop_config=args,
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=gpus),
        # If a worker dies, Ray ends the others and starts all of them anew, this often.
        run_config=RunConfig(
            storage_path=str(args.out / "ray"),
            failure_config=FailureConfig(max_failures=2),
        ),
        torch_config=TorchConfig("nccl" if gpus else "gloo", timeout_s=args.timeout),
    )


def own_ray(args, folder):
    """The options of a Ray of our own, with its files in a folder. Ray reads most of its
    settings from the environment when it is imported, and its processes inherit them.
    """
    # Only processes that know the token can give this Ray work.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)
    # Listen on loopback only: the default on Windows and macOS, hence the name. What
    # still listens everywhere is the store of the process group, which torch opens.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return {"num_cpus": args.workers, "include_dashboard": False, "_temp_dir": folder}


def connect(ray, **options):
    try:
        ray.init(**options)
    except Exception as error:  # of no class of its own
        reason = str(error).partition("\n")[0]
        problem = f"no Ray, perhaps this machine is too busy: {reason}"
        raise UsageError(problem) from None


def run(args):
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # which go to Ray's makers
    # On a busy laptop, Ray's processes need longer to start than Ray waits by default.
    os.environ["RAY_raylet_start_wait_time_s"] = "300"
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "300"
    folder = tempfile.mkdtemp(prefix="ray-")
    options = {"address": args.address} if args.address else own_ray(args, folder)
    import ray

    try:
        with redirect_stdout(sys.stderr):  # for what Ray says itself
            connect(ray, log_to_driver=args.verbose, logging_level="ERROR", **options)
            return trainer(args).fit().return_value
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def main(argv=()):
    parser = runs.parser(lesson04.__file__, __doc__)
    flag = parser.add_argument
    flag("--learning-rate", type=float, default=1e-3)
    flag("--workers", type=runs.count, default=2, help="ranks, on all machines (2)")
    flag("--address", help="of a Ray that runs already, NAME:PORT")
    flag("--lose-a-worker", action="store_true", help="the last rank dies in step 5")
    flag("--verbose", action="store_true", help="show what Ray and its workers print")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("ray") is None:
        fix = 'pip install -c constraints.txt -e ".[engines]"'
        raise UsageError(f"Ray is not installed: {fix}")
    args.out = args.out.absolute()  # workers have other working folders
    runs.empty_folder(args.out)
    result = run(args)
    print(*sorted((args.out / "workers.txt").read_text().splitlines()), sep="\n")
    print("\n".join(f"{name:<20}{value}" for name, value in result.items()))
    return result


if __name__ == "__main__":
    runs.start(main)
