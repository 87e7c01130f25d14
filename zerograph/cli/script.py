"""SCRIPT:STEP: a graph from a user's script, which is imported, so that its main part does not run."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import typer

from zerograph import _torch
from zerograph.base import source
from zerograph.base.progress import tell
from zerograph.config import OPTIONS, Config, place
from zerograph.errors import ConfigError, ZeroGraphError, did_you_mean
from zerograph.graph import ZeroGraph
from zerograph.inspection.step import Prepared
from zerograph.ir.mesh import Mesh
from zerograph.ir.offload import Offload
from zerograph.ir.precision import LOW_DTYPES, precision_text
from zerograph.ir.slots import unravel
from zerograph.loops.prepare import WholeStep, loop_of

_HELP = (
    "STEP is a ZeroGraph of the script, or a function without arguments that returns (step, inputs):\n"
    "  def example():\n"
    "      return TrainStep(Gpt()), (torch.zeros(8, 128, dtype=torch.int64),)\n"
    "For a loop STEP is the model that zg.prepare() has prepared with its optimizer."
)


def load(
    script: str,
    inputs: str | None = None,
    precision: str | None = None,
    settings: Sequence[str] | None = None,
    *,
    meta: bool = False,
) -> tuple[ZeroGraph, tuple[Any, ...]]:
    """Load the graph that ``train.py:example`` names, and its inputs.

    Args:
        inputs: name of inputs in the script, or of a function that returns them; required if STEP is a graph.
        precision: a value that :func:`zerograph.cli.options.precision_checked` accepts; None: the script's own.
        settings: options to set, each as ``option=value``, or ``offload.part=value`` for a part of that option.
        meta: call functions of the script with the meta device as default, so that their tensors take no memory.

    Raises:
        ConfigError: there is no such file or name, or it is neither graph nor function; the script failed; fp32 is
            asked for, but parameters have a narrower dtype; or an option does not exist or cannot have its value.
    """
    step, batch = _loaded(script, inputs, meta)
    if precision is not None:
        _set_precision(step, precision)
    _set(step.config, settings or ())
    return step, batch if isinstance(batch, tuple) else (batch,)


def _loaded(script: str, inputs: str | None, meta: bool) -> tuple[ZeroGraph, Any]:
    path, _, name = script.rpartition(":")
    if not path or not name:
        raise ConfigError(f"{script!r} is not SCRIPT:STEP, such as train.py:example\n{_HELP}")
    module = _imported(Path(path))
    step = _graph_of(_named(module, name, path))
    if isinstance(step, ZeroGraph):
        if inputs is None:
            raise ConfigError(
                f"{name} of {path} is a graph: inputs for it are missing\n"
                "Give --inputs NAME of the script, or the name of a function that returns (step, inputs)."
            )
        return step, _called(_named(module, inputs, path), inputs, path, meta)
    if isinstance(step, type) or not callable(step):
        raise ConfigError(f"{name} of {path} is {_type_of(step)}\n{_HELP}")
    result = _called(step, name, path, meta)
    step = _graph_of(result[0]) if isinstance(result, tuple) and len(result) == 2 else None
    if not isinstance(step, ZeroGraph):
        raise ConfigError(f"{name}() of {path} returned {_type_of(result)}, not (step, inputs)\n{_HELP}")
    return step, result[1]


def _graph_of(value: Any) -> Any:
    """Return the step of a loop for a prepared module, and any other value as it is."""
    return WholeStep(value) if isinstance(value, torch.nn.Module) and loop_of(value) is not None else value


def prepare(
    step: ZeroGraph,
    inputs: tuple[Any, ...],
    mesh: Mesh,
    *,
    device: str = "cpu",
    stage: int | None = None,
    transport: str = "torch",
) -> Prepared:
    """Prepare the step of a rank of ``mesh``, optionally at another ``stage`` than the script's (0: none).

    Raises:
        ConfigError: there is no such stage, or code of the script failed.
        ZeroGraphError: as :meth:`zerograph.graph.ZeroGraph.prepare`.
    """
    if stage is not None:
        step.config.set(stage=stage)
    with tracing(step):
        return step.prepare(mesh, *inputs, device=device, transport=transport)


def _set_precision(step: ZeroGraph, precision: str) -> None:
    if precision == "fp32":
        narrow = {parameter.dtype for parameter in _parameters(step) if parameter.dtype in LOW_DTYPES}
        if narrow:
            raise ConfigError(
                f"--precision fp32: {type(step).__name__} has parameters in {', '.join(map(str, narrow))}\n"
                "Create the model in fp32, or leave --precision out."
            )
        step.config.enable_amp(False)
        return
    step.config.enable_amp(dtype=torch.float16 if precision == "fp16" else torch.bfloat16)


def _set(config: Config, settings: Sequence[str]) -> None:
    values: dict[str, Any] = {}
    for text in settings:
        path, is_given, value = text.partition("=")
        *groups, name = path.split(".")
        option = groups.pop() if groups[-1:] == ["offload"] else name
        if not is_given:
            raise ConfigError(f"--set {text}: give OPTION=VALUE, such as seed=1 or offload.optimizer=cpu")
        if option in OPTIONS and not f".{place(option)}".endswith(".".join(("", *groups, option))):
            raise ConfigError(f"--set {text}: the option is {place(option)}")
        if option == "offload":
            offload: Offload = values.get(option, config.memory.offload)
            if name not in vars(offload):
                raise ConfigError(f"--set {text}: offload has {', '.join(vars(offload))}")
            values[option] = replace(offload, **{name: _value_of(value)})
        else:
            values[name] = _value_of(value)
    config.set(**values)


def _value_of(text: str) -> Any:
    """Return a value of Python, such as a number or None, or a dtype of torch; other text is itself."""
    dtype = getattr(torch, text.removeprefix("torch."), None) if text.startswith("torch.") else None
    with contextlib.suppress(ValueError, SyntaxError, TypeError):
        return dtype if isinstance(dtype, torch.dtype) else ast.literal_eval(text)
    return text


def shown_precision(step: ZeroGraph) -> str:
    """Return the precision of the step in words."""
    return precision_text(step.config.precision.amp_dtype, (parameter.dtype for parameter in _parameters(step)))


def _parameters(step: ZeroGraph) -> list[torch.nn.Parameter]:
    modules = (value for value in vars(step).values() if isinstance(value, torch.nn.Module))
    return [parameter for module in modules for parameter in module.parameters()]


@contextlib.contextmanager
def errors_of_script(doing: str, *, are_all_users: bool = True) -> Iterator[None]:
    """Report errors of the script's code inside the block, with the innermost line of the user that they passed.

    Args:
        doing: what has failed, for the message.
        are_all_users: so are errors that passed no line of the user. Else they are bugs, and pass unchanged.

    Raises:
        ConfigError: there was an error.
    """
    try:
        with _torch.errors_unlogged():
            yield
    except ZeroGraphError:
        raise
    except Exception as error:
        line, code = source.raising_line(error.__traceback__)
        if not (line or are_all_users):
            raise
        where = f"\n  {line}   {code}" if line else ""
        reported = ConfigError(f"{doing}: {type(error).__name__}: {error}{where}")
        for note in getattr(error, "__notes__", ()):
            reported.add_note(note)
        raise reported from error


def tracing(step: ZeroGraph) -> contextlib.AbstractContextManager[None]:
    """Return a block in which errors of the script's step are reported, while it is traced."""
    return errors_of_script(f"{type(step).__name__} failed while it was traced", are_all_users=False)


def mesh_of(world_size: int, rank: int, shape: str | None = None) -> Mesh:
    """Return the mesh of ``world_size`` ranks in a line, or of a grid such as ``2x4``, seen by ``rank``.

    Raises:
        ConfigError: there is no such rank or grid.
    """
    sizes: tuple[int, ...] = (world_size,)
    if shape is not None:
        parts = shape.split("x")
        if not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ConfigError(f"--mesh {shape}: give a grid of ranks, such as 2x4")
        sizes = tuple(map(int, parts))
        world_size = math.prod(sizes)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"there is no rank {rank} of {world_size}: ranks count from 0")
    names = ("ranks",) if len(sizes) == 1 else tuple(f"ranks{dim}" for dim in range(len(sizes)))
    return Mesh(sizes, unravel(rank, sizes), names)


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no script {path}")
    # Not named __main__: code under "if __name__ == '__main__'" does not run.
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"_script_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python script: its name ends in {path.suffix or 'nothing'}")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        # As Python does for a script.
        sys.path.insert(0, folder)
    sys.modules[name] = module
    tell("script", 0, 0, f"importing {path}")
    try:
        with errors_of_script(f"{path} failed while it was imported"), _counted_calls() as calls:
            spec.loader.exec_module(module)
    except SystemExit as error:
        raise ConfigError(
            f"{path} exited while it was imported ({error})\n"
            "Put code that must run only in a training run under: if __name__ == '__main__':"
        ) from error
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
    """Count the runs of steps inside the block, by class name."""
    calls: Counter[str] = Counter()
    run = ZeroGraph.__call__

    def counted(self: ZeroGraph, *args: Any, **kwargs: Any) -> Any:
        calls[type(self).__name__] += 1
        return run(self, *args, **kwargs)

    with mock.patch.object(ZeroGraph, "__call__", counted):
        yield calls


def _named(module: ModuleType, name: str, path: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        names = [key for key in vars(module) if not key.startswith("_")]
        steps = [key for key in names if _may_be_a_step(module, vars(module)[key])]
        hint = did_you_mean(name, names) or (f"; it has {', '.join(steps)}" if steps else "")
        raise ConfigError(f"{path} has no {name!r}{hint}\n{_HELP}") from None


def _may_be_a_step(module: ModuleType, value: Any) -> bool:
    """Return True for the script's own graphs, and its functions without arguments."""
    if not inspect.isfunction(value) or value.__module__ != module.__name__:
        return isinstance(value, ZeroGraph)
    parameters = inspect.signature(value).parameters.values()
    return all(parameter.default is not parameter.empty for parameter in parameters)


def _called(value: Any, name: str, path: str, meta: bool) -> Any:
    if not callable(value):
        return value
    place = torch.device("meta") if meta else contextlib.nullcontext()
    with errors_of_script(f"{name}() of {path} failed"), place:
        return value()


def _type_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
