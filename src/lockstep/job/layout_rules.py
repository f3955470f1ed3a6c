"""Which strategies, meshes and numbers of devices go together: said before anything is started or written."""

from __future__ import annotations

from lockstep.errors import ConfigError
from lockstep.job.config import JobConfig
from lockstep.mesh import Mesh, hybrid_mesh
from lockstep.strategy_options import (
    ELEMENTWISE,
    OWN_EXCHANGE,
    WHOLE_MODELS,
    FsdpOptions,
    mesh_of,
    shares_rows_out,
    steps_parts,
)


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
    """A mesh belongs to strategy hybrid, has axes that go together, and takes all devices."""
    strategy, mesh, count = job.training.strategy, job.training.mesh, device_count(job.run.devices)
    try:
        if strategy != "hybrid":
            mesh_of(strategy, mesh, 1)
            return None
        if not mesh:
            return "is not given, and strategy 'hybrid' needs one, such as 'data=2,pipeline=2'."
        laid_out = hybrid_mesh(mesh)
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
    reduce, strategy, mesh = job.training.reduce, job.training.strategy, job.training.mesh
    if reduce != "ordered" and (strategy in OWN_EXCHANGE or shares_rows_out(strategy, mesh)):
        return f"is {reduce!r}, and strategy {strategy!r} has an exchange of its own. Use 'ordered', or strategy 'ddp'."
    return None


def rows_are_contiguous(job: JobConfig) -> str | None:
    """Rows that are shared out are contiguous."""
    strategy = job.training.strategy
    if job.training.channels_last and shares_rows_out(strategy, job.training.mesh):
        return (
            f"is true, and strategy {strategy!r} shares out contiguous weights. Use false, or strategy 'ddp'."
        )
    return None


def offload_has_a_gpu(job: JobConfig) -> str | None:
    """What is moved to the host comes from a GPU."""
    if job.fsdp.cpu_offload and job.training.strategy == "fsdp" and str(job.run.devices).startswith("cpu"):
        return f"is true, which moves parameters from a GPU to the host, on devices {job.run.devices!r}. Use false."
    return None


def stages_are_gathered_once(job: JobConfig) -> str | None:
    """How strategy fsdp gathers blocks says nothing about the stages of a pipeline."""
    mesh = job.training.mesh
    if job.training.strategy != "hybrid" or "fsdp" not in mesh:
        return None
    given = [name for name, value in vars(job.fsdp).items() if value != getattr(FsdpOptions(), name)]
    if given:
        return f"is {mesh!r}, which gathers a stage once in a step and has no use for fsdp.{given[0]}. Leave that out."
    return None


def pipeline_is_filled(job: JobConfig) -> str | None:
    """There are at least as many micro-batches as stages on every pipeline."""
    count = device_count(job.run.devices)
    mesh = Mesh.parse(job.training.mesh) if job.training.strategy == "hybrid" and not mesh_fits(job) else None
    ranks = mesh.size("pipeline") if mesh else count if job.training.strategy == "pipeline" else None
    if ranks is None or ranks < 2:
        return None
    holders = mesh.size("data") * mesh.size("fsdp") if mesh else 1
    try:
        job.pipeline.check_micro_batches(job.training.micro_batches, holders, ranks)
    except ConfigError as error:
        return f"is {job.training.micro_batches}. {error}"
    return None


def parts_are_stepped_alone(job: JobConfig) -> str | None:
    """An optimizer of torch's that is stepped on parts of parameters is elementwise."""
    strategy, target = job.training.strategy, job.optimizer.target
    module, _, name = target.partition(":")
    alone = device_count(job.run.devices) == 1
    if alone or not steps_parts(strategy, job.training.mesh) or not module.startswith("torch.optim"):
        return None
    if name not in ELEMENTWISE:
        return (
            f"is {target!r}, and strategy {strategy!r} steps it on parts of parameters, where it would see too little. "
            f"Use one of {', '.join(sorted(ELEMENTWISE))}, or strategy 'ddp'."
        )
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
