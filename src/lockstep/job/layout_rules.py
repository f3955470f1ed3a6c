"""Which strategies, meshes and numbers of devices go together: said before anything is started or written."""

from __future__ import annotations

from lockstep.errors import ConfigError
from lockstep.job.config import JobConfig
from lockstep.mesh import Mesh
from lockstep.strategy_options import OWN_EXCHANGE, WHOLE_MODELS, mesh_of


def device_count(devices: int | str) -> int | None:
    """How many devices a setting asks for; None where the machine decides."""
    text = str(devices)
    if "," in text:
        return len(text.rstrip(",").split(","))
    number = text.removeprefix("cpu:")
    return int(number) if number.isdecimal() else None


def single_has_one_device(job: JobConfig) -> str | None:
    """Strategy single uses one device."""
    count = device_count(job.run.devices)
    if job.training.strategy == "single" and count is not None and count > 1:
        return f"is {job.run.devices!r}, but strategy 'single' uses one. Use devices=1, or strategy 'ddp'."
    return None


def ranks_have_micro_batches(job: JobConfig) -> str | None:
    """Every rank, or group of ranks that holds one model, has a micro-batch."""
    count, parts = device_count(job.run.devices), job.training.micro_batches
    if count is None or mesh_fits(job):
        return None
    holders = _holders(job, count)
    if holders > parts:
        spare = count - holders if job.training.strategy == "parameter_server" else 0
        return (
            f"is {job.run.devices!r}: {holders} devices cannot share micro_batches={parts}. "
            f"Use at most {parts + spare} devices, or a recipe with more micro-batches."
        )
    return None


def mesh_fits(job: JobConfig) -> str | None:
    """A mesh belongs to strategy hybrid, and takes all devices."""
    strategy, mesh, count = job.training.strategy, job.training.mesh, device_count(job.run.devices)
    try:
        if strategy != "hybrid":
            mesh_of(strategy, mesh, 1)
            return None
        if not mesh:
            return "is not given, and strategy 'hybrid' needs one, such as 'data=2,pipeline=2'."
        laid_out = Mesh.parse(mesh)
        layers = laid_out.size("layers")
        if count is not None and count % layers:
            return f"is {mesh!r}: each process gets {layers} devices of {count}. Use a multiple of {layers}."
        if count is not None:
            laid_out.check_world(count // layers)
    except ConfigError as error:
        return f"is {mesh!r}. {error}"
    return None


def servers_leave_a_worker(job: JobConfig) -> str | None:
    """Some process computes gradients."""
    count, servers = device_count(job.run.devices), job.parameter_server.servers
    if job.training.strategy == "parameter_server" and count is not None and 1 < count <= servers:
        return f"is {servers}, which leaves no worker among {count} processes. Use at most {count - 1}."
    return None


def reducer_is_used(job: JobConfig) -> str | None:
    """A reducer is chosen only where whole gradients are reduced."""
    reduce, strategy = job.training.reduce, job.training.strategy
    if reduce != "ordered" and strategy in OWN_EXCHANGE:
        return f"is {reduce!r}, and strategy {strategy!r} has an exchange of its own. Use 'ordered', or strategy 'ddp'."
    return None


def rows_are_contiguous(job: JobConfig) -> str | None:
    """Strategy fsdp shares rows out."""
    if job.training.channels_last and job.training.strategy == "fsdp":
        return "is true, and strategy 'fsdp' shares out contiguous weights. Use false, or strategy 'ddp'."
    return None


def compiled_models_are_whole(job: JobConfig) -> str | None:
    """What is compiled is a whole model."""
    strategy, mesh = job.training.strategy, job.training.mesh
    whole = strategy in WHOLE_MODELS or (strategy == "hybrid" and "layers" in mesh)
    if job.training.compile and not whole:
        return f"is true, and strategy {strategy!r} holds no whole model in one process. Use false, or strategy 'ddp'."
    return None


def _holders(job: JobConfig, count: int) -> int:
    """How many share the micro-batches of a step."""
    strategy = job.training.strategy
    if strategy == "hybrid":
        mesh = Mesh.parse(job.training.mesh)
        return mesh.size("data") * mesh.size("fsdp")
    if strategy == "parameter_server":
        return max(1, count - job.parameter_server.servers)
    return count if strategy in ("dp", "ddp", "fsdp") else 1
