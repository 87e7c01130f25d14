"""SCRIPT:STEP: a graph out of a user's script, which is imported, so that its main part does not run."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typer

from zerograph import _torch
from zerograph.base import source
from zerograph.base.progress import tell
from zerograph.errors import ConfigError, ZeroGraphError
from zerograph.graph import ZeroGraph
from zerograph.inspection.names import close_to
from zerograph.inspection.step import Prepared
from zerograph.ir.mesh import Mesh
from zerograph.ir.precision import LOW_DTYPES, precision_text

_HELP = (
    "STEP is a ZeroGraph of the script, or a function without arguments that returns (step, inputs):\n"
    "  def example():\n"
    "      return TrainStep(Gpt()), (torch.zeros(8, 128, dtype=torch.int64),)"
)


def load(script: str, inputs: str | None = None, *, meta: bool = False) -> tuple[ZeroGraph, tuple[Any, ...]]:
    """Load the graph that ``train.py:example`` names, and inputs for it.

    Args:
        inputs: the name of inputs in the script, or of a function that returns them; needed where STEP is a graph.
        meta: functions of the script are called with the meta device as default: what they make takes no memory.

    Raises:
        ConfigError: no such file or name, or not what it should be; or the script failed.
    """
    path, _, name = script.rpartition(":")
    if not path or not name:
        raise ConfigError(f"{script!r} is not SCRIPT:STEP: train.py:example, for instance\n{_HELP}")
    module = _imported(Path(path))
    found = _named(module, name, path)
    if isinstance(found, ZeroGraph):
        if inputs is None:
            raise ConfigError(
                f"{name} of {path} is a graph: inputs for it are missing\n"
                "Name some of the script with --inputs NAME, or name a function that returns (step, inputs) instead."
            )
        given = _called(_named(module, inputs, path), inputs, path, meta)
        return found, given if isinstance(given, tuple) else (given,)
    if isinstance(found, type) or not callable(found):
        raise ConfigError(f"{name} of {path} is {_what(found)}\n{_HELP}")
    made = _called(found, name, path, meta)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], ZeroGraph):
        raise ConfigError(f"{name}() of {path} returned {_what(made)}, not (step, inputs)\n{_HELP}")
    return made[0], made[1] if isinstance(made[1], tuple) else (made[1],)


def prepare(
    step: ZeroGraph, inputs: tuple[Any, ...], mesh: Mesh, *, device: str = "cpu", stage: int | None = None
) -> Prepared:
    """Prepare what a rank of ``mesh`` would run, at another ``stage`` than the script's (0: none).

    Raises:
        ConfigError: no such stage; or what the script's step is made of failed.
        ZeroGraphError: as :meth:`zerograph.graph.ZeroGraph.prepare`.
    """
    if stage is not None:
        if stage not in range(4):
            raise ConfigError(f"there is no stage {stage}: stages are 1, 2 and 3, and 0 is none")
        mode = "distributed_split" if step.config.mode == "off" else step.config.mode
        step.config.enable_zero(mode if stage else "off", stage=stage or 1, shard_min_size=step.config.shard_min_size)
    with tracing(step):
        return step.prepare(mesh, *inputs, device=device)


def set_precision(step: ZeroGraph, precision: str | None) -> None:
    """Let the script's step compute in this precision; None: as the script says.

    Args:
        precision: as :func:`zerograph.cli.options.precision_checked` lets it through.

    Raises:
        ConfigError: fp32 of a step whose parameters are narrower.
    """
    if precision is None:
        return
    if precision == "fp32":
        narrow = {one.dtype for one in _parameters(step) if one.dtype in LOW_DTYPES}
        if narrow:
            raise ConfigError(
                f"--precision fp32: {type(step).__name__} has parameters in {', '.join(map(str, narrow))}\n"
                "Make the model in fp32, or leave --precision out."
            )
        step.config.enable_amp(False)
        return
    step.config.enable_amp(dtype=torch.float16 if precision == "fp16" else torch.bfloat16)


def shown_precision(step: ZeroGraph) -> str:
    """Name what the step computes in."""
    return precision_text(step.config.amp_dtype, (one.dtype for one in _parameters(step)))


def _parameters(step: ZeroGraph) -> list[torch.nn.Parameter]:
    modules = (one for one in vars(step).values() if isinstance(one, torch.nn.Module))
    return [one for module in modules for one in module.parameters()]


@contextlib.contextmanager
def tracing(step: ZeroGraph) -> Iterator[None]:
    """While the script's step is traced: what it raises is told with its line, as other failures of the script are.

    Raises:
        ConfigError: the step failed. What came through no line of the user's is an error of ours, and stays as it is.
    """
    try:
        with _torch.errors_unlogged():
            yield
    except ZeroGraphError:
        raise
    except Exception as error:
        line, code = source.raising_line(error.__traceback__)
        if not line:
            raise
        raise ConfigError(
            f"{type(step).__name__} failed while it was traced: {type(error).__name__}: {error}\n  {line}   {code}"
        ) from error


def mesh_of(world_size: int, rank: int, shape: str | None = None) -> Mesh:
    """So many ranks as this one of them sees them: in a row, or as a grid ``2x4``.

    Raises:
        ConfigError: no such rank or grid.
    """
    sizes: tuple[int, ...] = (world_size,)
    if shape is not None:
        parts = shape.split("x")
        if not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ConfigError(f"--mesh {shape}: a grid of ranks is 2x4, for instance")
        sizes = tuple(map(int, parts))
        world_size = 1
        for size in sizes:
            world_size *= size
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"there is no rank {rank} of {world_size}: ranks count from 0")
    position = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        position.append(place)
    names = ("ranks",) if len(sizes) == 1 else tuple(f"ranks{dim}" for dim in range(len(sizes)))
    return Mesh(sizes, tuple(reversed(position)), names)


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no script {path}")
    # Not __main__: what stands under "if __name__ == '__main__'" does not run.
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"_script_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python script: its name ends in {path.suffix or 'nothing'}")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        # As Python does for a script that it runs.
        sys.path.insert(0, folder)
    sys.modules[name] = module
    tell("script", 0, 0, f"importing {path}")
    try:
        with _counted_calls() as calls:
            spec.loader.exec_module(module)
    except ZeroGraphError:
        raise
    except SystemExit as error:
        raise ConfigError(
            f"{path} ended itself while it was imported ({error})\n"
            "Put what is to happen only when it runs under: if __name__ == '__main__':"
        ) from error
    except Exception as error:
        raise ConfigError(f"{path} failed while it was imported: {_told(error, path)}") from error
    tell("script", 0, 0)
    if calls.total():
        steps = ", ".join(f"{name} ran {count} time{'s' * (count != 1)}" for name, count in calls.items())
        typer.echo(
            f"{path}: {steps} while the script was imported\n"
            "Put the loop under: if __name__ == '__main__':  Commands import a script to find its step.",
            err=True,
        )
    return module


@contextlib.contextmanager
def _counted_calls() -> Iterator[Counter[str]]:
    """Count how often steps run inside the block, by the name of their class."""
    calls: Counter[str] = Counter()
    run = ZeroGraph.__call__

    def counted(self: ZeroGraph, *args: Any, **kwargs: Any) -> Any:
        calls[type(self).__name__] += 1
        return run(self, *args, **kwargs)

    ZeroGraph.__call__ = counted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        ZeroGraph.__call__ = run  # type: ignore[method-assign]


def _named(module: ModuleType, name: str, path: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        known = [one for one in vars(module) if not one.startswith("_")]
        there = [one for one in known if _may_be_a_step(module, vars(module)[one])]
        offered = f"; it has {', '.join(there)}" if there else ""
        raise ConfigError(f"{path} has no {name!r}{close_to(name, known) or offered}\n{_HELP}") from None


def _may_be_a_step(module: ModuleType, found: Any) -> bool:
    """Whether it is one of the script's own that a command could take: a graph, or a function without arguments."""
    if not inspect.isfunction(found) or found.__module__ != module.__name__:
        return isinstance(found, ZeroGraph)
    return all(one.default is not one.empty for one in inspect.signature(found).parameters.values())


def _called(found: Any, name: str, path: str, meta: bool) -> Any:
    if not callable(found):
        return found
    try:
        with torch.device("meta") if meta else contextlib.nullcontext():
            return found()
    except ZeroGraphError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}() of {path} failed: {_told(error, Path(path))}") from error


def _told(error: Exception, path: Path) -> str:
    """Describe the error, with the last line of the script that it passed through."""
    line = ""
    with contextlib.suppress(OSError):
        own = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).name == path.name]
        line = f"\n  {path}:{own[-1].lineno}   {own[-1].line}" if own else ""
    return f"{type(error).__name__}: {error}{line}"


def _what(found: Any) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
