"""A compiled step as a file: the captured graph, the updates, and the graph that a rank runs.

Another process uses each part only where its own model, configuration and layout say the same. The captured graph and
the updates serve any rank of any layout; the graph after the passes serves every rank of one layout.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from zerograph.artifact.code import described, digests, names_of
from zerograph.artifact.digest import short
from zerograph.artifact.file import file_content, parse_file, read_file
from zerograph.artifact.graphs import (
    GraphReader,
    GraphWriter,
    read_captured,
    read_program,
    write_captured,
    write_program,
)
from zerograph.artifact.process import process_texts
from zerograph.artifact.values import Reader, Writer
from zerograph.base.contexts import collection_paused
from zerograph.base.recording import Recording
from zerograph.capture.accelerator import ACCELERATOR
from zerograph.capture.captured import Captured
from zerograph.compiler.batch import Batch
from zerograph.compiler.compiled import PreparedStep
from zerograph.compiler.members import Members
from zerograph.compiler.memory_search import MemoryCandidate
from zerograph.compiler.step_key import StepRequest
from zerograph.config import Config, place
from zerograph.errors import ArtifactError
from zerograph.ir.buckets import Bucket
from zerograph.ir.dims import Dim
from zerograph.ir.mesh import Mesh, index_along
from zerograph.ir.sbp import show
from zerograph.ir.update_program import UpdateProgram
from zerograph.passes.buckets.coded_updates import update_module
from zerograph.passes.context import BucketUpdate, Context
from zerograph.passes.pipeline import PassRecord, restored

# They do not change the graph.
_OTHER_OPTIONS = (
    *("backend", "check_replicas", "grad_scaler", "keep_freed_memory", "memory_budget", "placement", "seed", "timeout"),
)
_MESH = "the mesh"
# Requirements that inputs and ranks decide.
_OF_INPUTS = (_MESH, "the nesting of the inputs", "input ")
# Differences that a message lists.
_MOST_DIFFERENCES = 8


def requirements(
    members: Members,
    facts: Mapping[str, str],
    config: Config,
    request: StepRequest,
    mesh: Mesh | None = None,
    batch: Batch | None = None,
) -> dict[str, str]:
    """Return what must be equal to use a captured graph again, besides code and versions, as text by name.

    Each compilation asks for them; versions are a matter of reading and writing files.

    Args:
        members: the graph's modules and tensors.
        facts: what a captured graph depends on besides its inputs, as text by name.
        config: the graph's options.
        request: what the caller asks for.
        mesh, batch: the ranks and the inputs, which decide requirements too; None to leave these out.
    """
    device = "accelerator" if members.meta is None else members.meta.type
    required = {
        "loss scaling": str(config.scaler is not None),
        **{place(name): str(value) for name, value in config.options().items() if name not in _OTHER_OPTIONS},
        **{name: _without_index(text, device) for name, text in facts.items()},
        **request.texts(),
    }
    if mesh is None or batch is None:
        return required
    inputs = {
        f"input {name}": f"({', '.join(map(_size, spec.shape))}) {spec.dtype} {spec.device.type} {show(sbp)}"
        for name, spec, sbp in zip(batch.names, batch.specs, batch.sbp, strict=True)
    }
    nesting = {_MESH: "x".join(map(str, mesh.shape)), "the nesting of the inputs": str(batch.tree)}
    return {**required, **nesting, **dict(batch.constants), **inputs}


def _size(size: Any) -> str:
    return f"{size.name} ({size.minimum} to {size.maximum})" if isinstance(size, Dim) else str(size)


def _without_index(text: str, meta: str) -> str:
    """Return a text in which devices have no index: that of a rank's accelerator is its own."""
    text = re.sub(r"device\(type='meta'\)", f"device(type='{meta}')", text)
    return re.sub(r"device\(type='(\w+)', index=\d+\)", r"device(type='\1')", text)


def artifact_content(step: PreparedStep, trace: Recording) -> bytes:
    """Return the content of the file of a step.

    Args:
        step: the step.
        trace: what its trace ran.

    Raises:
        ArtifactError: a part of the step cannot be written to a file.
    """
    context = step.context
    if any(bucket.device == ACCELERATOR for bucket in context.buckets):
        raise ArtifactError(
            "the step is prepared for an accelerator that this build of torch need not support, with the CPU's "
            "operators\nExport it for device='cpu', or for device='cuda' with a build of torch for CUDA."
        )
    writer = Writer()
    captured = write_captured(step.captured, writer)
    updates, programs = _updates(context)
    emitted = step.passes[-1].graph
    document = {
        "requirements": {**process_texts(), **step.requirements},
        "code": digests(names_of(trace)),
        "captured": captured,
        "updates": updates,
        "programs": [write_program(program, writer) for program in programs],
        "candidate": writer.value(tuple(getattr(step.candidate, one.name) for one in fields(MemoryCandidate))),
        "context": context_text(context, step.captured),
        "emitted": GraphWriter(writer, context.mesh.groups).write(emitted, emitted.graph),
        "passes": [[record.name, record.summary, record.nodes, record.seconds] for record in step.passes],
        "warnings": list(step.warnings),
        "table": writer.table,
    }
    content = file_content(document, writer.tensors)
    _check_readable(step, content)
    return content


def _check_readable(step: PreparedStep, content: bytes) -> None:
    """Check that another process can read all parts of a file.

    Raises:
        ArtifactError: it cannot.
    """
    document, tensors = parse_file("the file", content)
    artifact = Artifact("the file", document, Reader(document["table"], tensors, None), optional=False)
    _ = artifact.programs, artifact.candidate, artifact.warnings
    if artifact.passes(artifact.captured, step.context) is None:
        raise ArtifactError("the step is another one when its file is read again")


def _updates(context: Context) -> tuple[dict[str, list[Any]], list[UpdateProgram]]:
    """Return the group and the number of the update of each parameter, by name, and the updates."""
    numbers: dict[UpdateProgram, int] = {}
    updates: dict[str, list[Any]] = {}
    for bucket in context.buckets:
        update = context.updates.get(bucket.name)
        if update is None:
            continue
        group = update.numbers["lr"].removesuffix(".lr")
        for slot, program in zip(bucket.slots, update.programs, strict=True):
            updates[slot.name] = [group, numbers.setdefault(program, len(numbers))]
    return updates, list(numbers)


def context_text(context: Context, captured: Captured) -> str:
    """Return all that the passes read besides the captured graph, as text that is equal on all ranks."""
    scaler = context.numerics.scaler
    lines = [
        f"mesh {context.mesh.shape}",
        f"policy {context.policy}",
        *(f"bucket {_bucket_text(bucket)}" for bucket in context.buckets),
        *(f"update {name} {_update_text(update)}" for name, update in sorted(context.updates.items())),
        f"batch {context.batch}",
        f"numerics {context.numerics.reduce_dtype} {context.numerics.checked}",
        f"scaler {type(scaler).__name__} {_options(scaler)}",
        f"memory {context.memory}",
        f"backend {context.backend.node_by_node} {context.backend.inputs_may_overlap}",
        *(f"exchange {kind} {operator}" for kind, operator in sorted(context.backend.exchanges.items())),
        f"missing rules {context.missing_rules.action}",
        f"edits {context.pass_edits}",
        f"gradients {context.gradients}",
        f"sizes {None if captured.sizes is None else sorted(captured.sizes.largest_sizes().items())}",
    ]
    return _without_index("\n".join(lines), "meta")


def _options(scaler: Any) -> dict[str, Any]:
    numbers = {} if scaler is None else {name: value for name, value in vars(scaler).items() if name[0] != "_"}
    return {name: value for name, value in numbers.items() if isinstance(value, (bool, int, float))}


def _bucket_text(bucket: Bucket) -> str:
    """Return a bucket without what the passes do not read: why its parameters are together."""
    return str(replace(bucket, key=None))


def _update_text(update: BucketUpdate) -> str:
    layouts = {name: _bucket_text(layout) for name, layout in update.layouts.items()}
    unused = {name: _bucket_text(layout) for name, layout in update.unused.items()}
    programs = [short(program.key) for program in update.programs]
    return f"{update.first} {update.numbers} {layouts} {unused} {update.unused_counts} {update.optimizer} {programs}"


@dataclass(frozen=True, eq=False)
class Artifact:
    """A step that was read from a file.

    Attributes:
        path: the file.
        document: its content.
        reader: reads the values in it.
        optional: the step is compiled where a part of the file cannot be used.
    """

    path: str
    document: Mapping[str, Any]
    reader: Reader
    optional: bool

    def holds_for(self, batch: Batch) -> bool:
        """Return whether the traced graph is valid for the sizes of a batch."""
        totals = {name: sum(rows) for name, rows in batch.sizes.items()}
        return all(guard.holds(totals) for guard in self.captured.guards)

    def differences(self, present: Mapping[str, str]) -> list[str]:
        """Return the names and texts of what differs from this process.

        Args:
            present: the requirements here, those of the process included: all of them, or those without inputs.
        """
        stored: dict[str, str] = self.document["requirements"]
        if _MESH not in present:
            stored = {name: text for name, text in stored.items() if not name.startswith(_OF_INPUTS)}
        names = [name for name in {**stored, **present} if stored.get(name) != present.get(name)]
        code: Mapping[str, str] = self.document["code"]
        here = digests(code)
        return [
            *(
                f"{name}: {stored.get(name, 'nothing'):.200} in the file, {present.get(name, 'nothing'):.200} here"
                for name in names
            ),
            *(described(name) for name, text in code.items() if here[name] != text),
        ]

    def check(self, differences: list[str]) -> None:
        """Raise an ArtifactError if there are differences."""
        if not differences:
            return
        more = len(differences) - _MOST_DIFFERENCES
        listed = [*differences[:_MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])]
        raise ArtifactError(
            f"{self.path} is of another step than this one\n  " + "\n  ".join(listed) + "\n"
            "Export the step again, or leave load_compiled() out: the step is then compiled here."
        )

    @functools.cached_property
    def captured(self) -> Captured:
        """The captured graph.

        Raises:
            ArtifactError: the file has something else in its place.
        """
        with self._reading():
            return read_captured(self.document["captured"], self.reader)

    @functools.cached_property
    def programs(self) -> dict[str, tuple[str, UpdateProgram]]:
        """The optimizer's group, as named in the graph, and the update of each parameter by name."""
        with self._reading():
            programs = [read_program(program, self.reader) for program in self.document["programs"]]
            return {name: (group, programs[number]) for name, (group, number) in self.document["updates"].items()}

    @property
    def candidate(self) -> MemoryCandidate:
        """The bucket size and the recomputation that the memory search found."""
        with self._reading():
            size, recomputed, offloads = values = self.reader.value(self.document["candidate"])
            if type(size) not in (int, type(None)) or type(recomputed) is not int or type(offloads) is not bool:
                raise TypeError(f"{values!r:.60} are no bucket size and recomputation")
            return MemoryCandidate(size, recomputed, offloads)

    @property
    def warnings(self) -> list[str]:
        """Messages of the compilation."""
        with self._reading():
            return list(map(str, self.document["warnings"]))

    def passes(self, captured: Captured, context: Context) -> tuple[PassRecord, ...] | None:
        """Return the record of each pass, with the graph that this rank runs; None if the passes got something else.

        Args:
            captured: :attr:`captured`.
            context: what the passes would get here.
        """
        if self.document.get("context") != context_text(context, captured):
            return None

        def owner_update(name: str) -> nn.Module:
            bucket = context.bucket(name)
            position = index_along(context.mesh, bucket.zero_dims)
            return update_module(bucket, context.updates[name], position, guarded=context.guarded)

        with self._reading():
            # The captured graph was read before, which has the symbols of sizes.
            emitted = GraphReader(self.reader, context.mesh, owner_update).read(self.document["emitted"])
            return restored(self.document["passes"], captured.graph, context, emitted)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Name the file in errors of the block, which reads a part of it."""
        try:
            with collection_paused():
                yield
        except ArtifactError as error:
            raise ArtifactError(f"{self.path}: {error}") from None
        except Exception as error:
            raise ArtifactError(f"{self.path} is no step: {type(error).__name__}: {error}") from error


_TABLES = ("requirements", "code")


def read_artifact(path: str | os.PathLike[str], members: Members, data: bytes | None = None) -> Artifact:
    """Read a step from a file. Its graphs are read when they are used.

    Args:
        path: the file.
        members: the modules and tensors of the graph.
        data: the file's content, if it has been read.

    Raises:
        ArtifactError: there is no such file, or it is damaged.
    """
    document, tensors = read_file(path) if data is None else parse_file(path, data)
    if not isinstance(document, dict) or not all(_is_text(document.get(name)) for name in _TABLES):
        raise ArtifactError(f"{path} is no step")
    devices = (parameter.device for parameter in members.parameters.values())
    accelerator = next((device for device in devices if device.type != "cpu"), None)
    reader = Reader(document.get("table", ()), tensors, accelerator)
    return Artifact(os.fspath(path), document, reader, optional=data is not None)


def _is_text(table: Any) -> bool:
    """Return whether a value is a table of texts by name."""
    return isinstance(table, dict) and all(isinstance(text, str) for text in table.values())


@dataclass(eq=False)
class LoadedArtifacts:
    """The artifacts that one graph has loaded, in order."""

    _artifacts: list[Artifact] = field(default_factory=list)
    # The artifact that was loaded last, until a step uses it.
    _unused: Artifact | None = None

    def add(self, artifact: Artifact, present: Mapping[str, str]) -> None:
        """Use the step of a file for inputs that it was made for; the next step to be compiled must be that one.

        Args:
            artifact: the step.
            present: the requirements here, without inputs.

        Raises:
            ArtifactError: the file is of another step.
        """
        artifact.check(artifact.differences({**process_texts(), **present}))
        self._artifacts.append(artifact)
        self._unused = artifact

    def find(self, present: Mapping[str, str], batch: Batch) -> Artifact | None:
        """Return the artifact for a step; None if there is none.

        Args:
            present: the requirements of the step.
            batch: its inputs.

        Raises:
            ArtifactError: the one that was loaded last, and is not used yet, is of another step.
        """
        if self._artifacts:
            present = {**process_texts(), **present}
        for artifact in self._artifacts:
            if not artifact.differences(present) and artifact.holds_for(batch):
                if artifact is self._unused:
                    self._unused = None
                return artifact
        # Dimensions may become dynamic in later calls only.
        if self._unused is not None and not self._unused.captured.sizes:
            self._unused.check(self._unused.differences(present))
        return None
