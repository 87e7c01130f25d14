"""Dependencies of a step besides its inputs: tensors, options, code, and the values that code reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerograph import _torch
from zerograph.artifact import process
from zerograph.artifact.code import digests, names_of, own_names, read_names, unseen
from zerograph.artifact.digest import Digest
from zerograph.base.names import values_of
from zerograph.base.recording import Recording
from zerograph.capture.places import PLAIN, attributes_of
from zerograph.compiler.members import Members, Optimizers
from zerograph.config import Config
from zerograph.optim.surroundings import attributes_read, constructed_for, own_attributes
from zerograph.passes.rules.registry import user_rules

# The name among the attributes of a graph of a loop for what its ``build()`` does.
OF_LOOP = "the part of the loop"
_FRAMEWORKS = ("zerograph.compat", "zerograph.integrations")


@dataclass(frozen=True, eq=False)
class Dependencies:
    """Everything that the steps of a graph depend on.

    Attributes:
        facts: those that a capture compares, as text by name.
        read_facts: returns them as they are now.
        graph: the graph.
        attributes: its attributes, private ones of the user's class included; and :data:`OF_LOOP`.
        members: its modules and tensors.
        optimizers: its optimizers.
        config: its options.
    """

    facts: Mapping[str, str]
    read_facts: Callable[[], Mapping[str, str]]
    graph: object
    attributes: Mapping[str, Any]
    members: Members
    optimizers: Optimizers
    config: Config

    def texts(self, *, now: bool = False) -> dict[str, str]:
        """Return everything as text by name, except for the code that a trace runs.

        Args:
            now: read the facts anew: a trace may have changed modules.
        """
        facts = self.read_facts() if now else self.facts
        return {**facts, **self._digests(self._digest(), None)}

    def doubts(self, trace: Recording) -> list[str]:
        """Return why the texts and digests of a traced step may be equal where its graph is not; empty if they do not.

        Args:
            trace: what the trace ran.
        """
        of_code, digest = Digest(), self._digest()
        digests(names_of(trace), of_code)
        # What no code names is not read: schedulers and tokenizers may be in attributes.
        self._digests(digest, read_names(trace))
        doubts = [*trace.doubts, *of_code.doubts, *digest.doubts]
        doubts += [*unseen(trace, [of_code, digest]), *self.foreseen_doubts()]
        if self._is_of_loop:
            # No code of the user has the graph.
            return doubts if trace.codes else [*doubts, "no code of the model ran"]
        if not any(code.co_name == "build" for code in trace.codes):
            doubts.append("no build() ran")
        # Counts of steps, for instance.
        hidden = (getattr(self.graph, "__dict__", {}).keys() - self.attributes.keys()) & own_names(trace)
        doubts += [f"the code reads {name}, an attribute of zg.ZeroGraph" for name in sorted(hidden)]
        return doubts

    def foreseen_doubts(self) -> list[str]:
        """Return those of :meth:`doubts` that no trace is needed for."""
        doubts = process.doubts()
        kinds = [type(self.graph), *(map(type, self.members.root.modules()) if self._is_of_loop else ())]
        names = [kind.__module__ for cls in kinds for kind in cls.__mro__ if kind.__module__.startswith(_FRAMEWORKS)]
        if names or (type(self.graph).__module__.startswith("zerograph.loops") and not self._is_of_loop):
            doubts.append(f"a class of {[*names, type(self.graph).__module__][0]} keeps state of its own")
        if modes := _torch.active_modes():
            doubts.append(f"modes of torch are active: {', '.join(modes)}")
        if self.config.checks.on_missing_rule == "discover":
            doubts.append("config.checks.on_missing_rule = 'discover' runs operators")
        return doubts

    @property
    def _is_of_loop(self) -> bool:
        return OF_LOOP in self.attributes

    def _digest(self) -> Digest:
        """Return a digest to which the graph, its modules and their tensors are names: they are compared here."""
        root = self.members.root
        named = [*root.named_modules(), *root.named_parameters(), *root.named_buffers()]
        return Digest({**{id(one): name for name, one in named}, id(self.graph): "graph", id(root): "graph"})

    def _digests(self, digest: Digest, names: Collection[str] | None) -> dict[str, str]:
        """Return digests of what a graph, its modules and optimizers hold besides tensors, of their classes, and more.

        Args:
            digest: collects doubts.
            names: digest attributes of these names only; None for all.
        """
        texts: dict[str, str] = {}
        modules = {name: module for name, module in self.members.root.named_modules() if name}
        own = {name: value for name, value in self.attributes.items() if name != OF_LOOP}
        for path, values in {"self": own, **{name: vars(module) for name, module in modules.items()}}.items():
            for name, value, guard in attributes_of(values, private=path != "self"):
                # Tokens, and the members, are compared as they are.
                is_compared = isinstance(guard, tuple) or isinstance(value, nn.Parameter)
                if not is_compared and (names is None or name in names):
                    texts[f"the attribute {path}.{name}"] = digest.of(value)
        for path, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                digest.doubts[f"{path} is compiled by TorchScript"] = None
            if hooks := [hook for table in _torch.hook_tables(module) for hook in table.values()]:
                texts[f"the hooks of {path}"] = digest.of(hooks)
        for cls in dict.fromkeys(map(type, [self.graph, *modules.values()])):
            texts[f"the class {cls.__module__}.{cls.__qualname__}"] = digest.of(cls)
        if self._is_of_loop:
            texts[OF_LOOP] = digest.of(self.attributes[OF_LOOP])
        tensors = {**self.members.parameters, **self.members.buffers}
        for name, tensor in tensors.items():
            noted = own_attributes(tensor)
            if noted or type(tensor) not in (nn.Parameter, torch.Tensor, nn.Buffer):
                texts[f"the attributes of {name}"] = f"{type(tensor).__qualname__} {digest.of(noted)}"
        for number, optimizer in enumerate(self.optimizers):
            attributes = dict(sorted(attributes_read(optimizer).items()))
            groups = [
                {name: entry for name, entry in group.items() if name != "params" and not _is_plain(entry)}
                for group in optimizer.param_groups
            ]
            constructed = [
                constructed_for(optimizer, one) for group in optimizer.param_groups for one in group["params"]
            ]
            texts[f"optimizer {number}"] = " ".join(
                [digest.everything_of(type(optimizer)), digest.of(attributes), digest.of(groups), repr(constructed)]
            )
            # No trace of an update is recorded: the modules count whole in which torch's optimizers are.
            names = [kind.__module__ for kind in type(optimizer).__mro__]
            spaces = [values_of(vars(sys.modules[name])) for name in names if name.startswith("torch.optim.")]
            texts[f"torch.optim for optimizer {number}"] = Digest().everything_of(spaces)
        texts["passes of the user"] = " ".join(digest.everything_of(edit.run) for edit in self.config.passes)
        texts["rules of the user"] = " ".join(
            f"{operator} {digest.everything_of([rule.notation, rule.linear, rule.batch])}"
            for operator, rule in user_rules()
        )
        return texts


def _is_plain(value: Any) -> bool:
    """Return whether a hyperparameter is a number or a tensor, which a capture compares, or tuples of these."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (*PLAIN, torch.Tensor))
