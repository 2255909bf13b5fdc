"""Several processes, started by torchrun, each with the whole policy and its own share of the groups.

A group lives whole on one process, so its advantages need nothing from the others. What must be shared is little: the sum of
the gradients, the counts that losses are divided by, and metrics. Alone, each function here returns what it was given. Left
out: splitting one policy over several devices (FSDP, tensor parallelism), and machines without a common disk.
"""

import signal
from collections.abc import Iterable, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ProcessLost(RuntimeError):
    """Another process of this run cannot be reached, most often because it has ended, so this one cannot go on."""

    def __init__(self, cause: str = ""):
        said = f" ({cause.splitlines()[0]})" if cause else ""
        super().__init__(f"another process of this run has ended; from the last checkpoint, --resume goes on{said}")


def count() -> int:
    """How many processes train this policy."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0. Only process 0 writes and prints."""
    return dist.get_rank() if count() > 1 else 0


def share(items: Sequence) -> Sequence:
    """This process's part of a sequence: neighbors, and as many as the others have, or one more or less.

    >>> share([1, 2, 3])
    [1, 2, 3]
    """
    return items[rank() * len(items) // count() : (rank() + 1) * len(items) // count()]


def shares(completion_mask: Tensor) -> tuple[float, float]:
    """Which part of the tokens of all processes, and of their completions, lies in this (N, T) mask.

    A mean over everything is the sum, over processes, of share · mean. The plain mean of the means would weigh each token of
    a process with short completions too much.
    """
    if count() == 1:
        return 1.0, 1.0
    own = torch.tensor([completion_mask.sum().item(), len(completion_mask)], dtype=torch.float64, device=device())
    return tuple((own / add_up(own.clone()).clamp(min=1)).tolist())


def add_up(tensor: Tensor) -> Tensor:
    """The sum over processes, in place.

    Raises:
        ProcessLost: another process has ended.
    """
    if count() > 1:
        with peers():
            dist.all_reduce(tensor)
    return tensor


def add_up_numbers(numbers: dict[str, float]) -> dict[str, float]:
    """The sum over processes of each number; all processes must have the same names."""
    if count() == 1:
        return numbers
    own = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device())
    return dict(zip(numbers, add_up(own).tolist()))


def add_up_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its sum over processes."""
    if count() > 1:
        with peers():
            for parameter in parameters:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)


def device() -> str:
    """Where numbers must lie to be sent: nccl alone, as other programs may have set it up, sends from GPUs only."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def start_alike(policy: nn.Module) -> None:
    """Give all processes the weights of process 0."""
    if count() > 1:
        with peers():
            for weight in policy.state_dict().values():
                dist.broadcast(weight, src=0)


def any_of(here: bool) -> bool:
    """Whether it is true on any process: all must turn off the road together, or some would wait for ever."""
    return add_up_numbers({"here": float(here)})["here"] > 0


def own_generator(generator: torch.Generator) -> torch.Generator:
    """A source of randomness that differs between processes, while `generator` stays the same on all.

    So one checkpoint serves all processes, and a run may be resumed with another number of them.
    """
    if count() == 1:
        return generator
    seed = torch.randint(2**62, (), generator=generator, device=generator.device).item()
    return torch.Generator(generator.device).manual_seed(seed + rank())


@contextmanager
def peers():
    """Say in clear words that a process is gone: torch's own error speaks of sockets."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(str(error)) from error


@contextmanager
def joined():
    """Work together with the processes that torchrun started: over gloo on CPUs, over nccl on GPUs. Alone without torchrun.

    A process that waits for a lost one says so. On GPUs it may be ended by torchrun before it can; torchrun then says it.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield
        return
    gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")  # Counts and metrics are sent from CPUs in any case.
    if gpu:
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())

    def lost(*_):
        raise ProcessLost

    signal.signal(signal.SIGTERM, lost)  # How torchrun tells a process that another one has ended.
    try:
        yield
    finally:
        dist.destroy_process_group()
