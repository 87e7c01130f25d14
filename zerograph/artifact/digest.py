"""Digests of Python values, equal in two processes where the values are: numbers, tensors, functions, classes, objects.

What a digest cannot tell of a value is a doubt: an object of a library in C, for instance, counts by its type only.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import hashlib
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zerograph._torch import OpOverload, compiled_original, operator_functions, untagged
from zerograph.artifact.allowed import REFLECTION, refused_in_c, refused_in_python
from zerograph.artifact.names import named_values, names_in
from zerograph.base import source

PLAIN = (
    *(type(None), type(NotImplemented), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum),
)
_NN = str(Path(torch.__file__).parent / "nn")
# Packages with which torch itself computes; what they have cached differs between processes.
_OF_TORCH = ("mpmath", "networkx", "numpy", "sympy")
# Attributes whose values differ between processes: transformers keeps a hash of strings.
_OF_PROCESS = ("_original_object_hash",)
# Dynamo numbers the functions that it does not compile.
_OF_DYNAMO = "_torchdynamo_"
# Values of the standard library that their text tells whole.
_TEXTS = frozenset({"re.Pattern", "decimal.Decimal", "fractions.Fraction", "itertools.count", "uuid.UUID"})
# Objects without a value that a trace could read.
_WITHOUT_VALUE = (
    "logging.",
    "_thread.lock",
    "_thread.RLock",
    "warnings.",
    "typing.",
    "abc.",
    "dataclasses._",
    "_collections._tuplegetter",
)
# Entries that transformers adds to classes of torch when it first needs them; where a trace runs them, they count.
ADDED = frozenset({"smart_apply"})
# Entries of classes that differ between processes, or say nothing.
_OF_CLASSES = ADDED | frozenset(
    {
        *(
            "__dict__",
            "__weakref__",
            "__doc__",
            "__module__",
            "__annotations__",
            "__slotnames__",
            "__abstractmethods__",
        ),
        *("__orig_bases__", "__parameters__", "__slots__", "__hash__", "__dataclass_params__", "_abc_impl"),
        "___needs_generation_tag_patch",
    }
)
# Entries of the classes that zerograph gives prepared modules, and parameters: to a trace they are their bases.
_OURS = frozenset({"_zerograph_prepared", "_zerograph_reader"})
# Longer containers, and objects nested deeper, are digested by their type and length.
_MAX_LENGTH, _MAX_DEPTH = 10_000, 24
# Types of what has no value besides its name, and the object that it belongs to.
_NAMED = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(functools._lru_cache_wrapper, type(torch.ops.aten.add), type(np.sqrt), type(np.mean)),
)
# Classes in C of whose objects all is digested, or the rest is no value.
_KNOWN_IN_C = (
    *(object, dict, list, tuple, set, frozenset, collections.deque, collections.defaultdict, collections.OrderedDict),
    *(int, float, complex, str, bytes, types.SimpleNamespace, types.ModuleType, threading.local, type),
    *(torch._C.TensorBase, torch._C._FunctionBase, functools.partial, property, staticmethod, classmethod),
)
# Objects of torch whose values change with every step.
_CHANGING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Generator)
_HEAP_TYPE = 1 << 9
_CODES = (*(staticmethod, classmethod, types.MethodType, property, functools.cached_property),)


def counts(filename: str) -> bool:
    """Return whether code of a file is digested: that of users, of installed packages and of ``torch.nn``."""
    if any(f"{os.sep}site-packages{os.sep}{package}{os.sep}" in filename for package in _OF_TORCH):
        return False
    return source.is_users(filename) or filename.startswith(_NN)


def module_name(name: str) -> str:
    """Return a module's name; that of a script is the name of its file, by which commands import it."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    is_script = name == "__main__" or name.startswith("_script_")
    return Path(file).stem if is_script and file is not None else name


def name_of(code: types.CodeType, module: str) -> str:
    """Return the name of the function that has the code, or that defines the function which has it."""
    return f"{module_name(module)}:{code.co_qualname.partition('.<locals>')[0]}"


@dataclass
class Visited:
    """Values and code that several digests saw.

    Attributes:
        executed: names of the functions whose globals count; None for all.
        own: names of the graph, its modules and their tensors, by ``id``, which are compared by themselves.
        doubts: values that a digest does not tell whole, as text.
        codes: the code of all functions seen, with that of the functions inside.
        functions: what is in the closures of the functions seen as objects, by their code.
        parents: the code that defines a function, by the function's code.
    """

    executed: Collection[str] | None = None
    own: Mapping[int, str] = field(default_factory=dict)
    doubts: dict[str, None] = field(default_factory=dict)
    codes: set[types.CodeType] = field(default_factory=set)
    functions: dict[types.CodeType, list[tuple[Any, ...]]] = field(default_factory=dict)
    memos: list[tuple[types.FunctionType, int]] = field(default_factory=list)
    parents: dict[types.CodeType, types.CodeType] = field(default_factory=dict)

    def doubt(self, reason: str) -> None:
        """Note a doubt."""
        self.doubts[reason] = None


class Digest:
    """Digests values, each object once.

    Args:
        visited: collects what is seen.
    """

    def __init__(self, visited: Visited) -> None:
        self.visited = visited
        # Digests by ``id``, and the objects, which keep these.
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []
        self._depth = 0
        # While a function of torch is digested: what it calls is compared, or changes no graph.
        self._is_torchs = False

    def of(self, value: Any) -> str:
        """Return the digest of a value. Objects that refer to themselves are digested up to the reference."""
        if isinstance(value, PLAIN) and type(value).__module__ in ("builtins", "torch"):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)):
            # Also where it was seen before: torch's own functions may have named it.
            self._note_call(value)
        key = id(value)
        if key not in self._seen:
            self._seen[key] = f"itself {self._depth}"
            self._kept.append(value)
            self._depth += 1
            try:
                text = self._text(value) if self._depth <= _MAX_DEPTH else self._unknown(value, "nested too deep")
            except Exception as error:
                # Objects may raise anything where an attribute is read.
                text = self._unknown(value, f"{type(error).__name__} when it is read")
            finally:
                self._depth -= 1
            self._seen[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._seen[key]

    def _unknown(self, value: Any, why: str = "its value cannot be compared") -> str:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        self.visited.doubt(f"an object of {name}: {why}")
        return f"object of {name}"

    def _text(self, value: Any) -> str:
        if value is sys.modules:
            self.visited.doubt("the code names sys.modules")
        if isinstance(value, PLAIN):
            return self._plain(value)
        for kind, text in _TEXT.items():
            if isinstance(value, kind):
                return f"{type(value).__qualname__} {text(self, value)}"
        if (functions := operator_functions(value)) is not None:
            return f"{value!r} {self.of(functions)}"
        if isinstance(value, _NAMED):
            return self._named_function(value)
        return self._object(value)

    def _named_function(self, value: Any) -> str:
        """Return the digest of a function in C, of a descriptor, or of a function whose results are kept."""
        owner = getattr(value, "__self__", None)
        is_bound = not (owner is None or isinstance(owner, (types.ModuleType, type)) or _is_bindings(owner))
        bound = self.of(owner) if is_bound else ""
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(value, functools._lru_cache_wrapper) and isinstance(wrapped, types.FunctionType):
            self.visited.memos.append((wrapped, value.cache_info().currsize))
        inside = "" if wrapped is None else self.everything_of(wrapped)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
        kind = getattr(value, "__objclass__", None)
        of = "" if kind is None else kind.__qualname__
        attributes = self._attributes(value, ("__wrapped__", "cache_parameters"))
        return f"{type(value).__name__} {getattr(value, '__module__', '')}.{of}.{name} {bound} {inside} {attributes}"

    def _plain(self, value: Any) -> str:
        """Return the digest of a number or a string of a class of its own, or of a member of an enumeration."""
        if isinstance(value, enum.Enum):
            own = {name: entry for name, entry in sorted(vars(value).items()) if name != "__objclass__"}
            return f"{type(value).__module__}.{type(value).__qualname__} {self.of(own)}"
        kind: Any = next(kind for kind in PLAIN if isinstance(value, kind))
        return f"{kind.__repr__(value)} {self._parts(value)}"

    def _note_call(self, value: Any) -> None:
        """Note a doubt about what may read something that is not compared, or keeps state in C."""
        if self._is_torchs:
            return
        refused = ""
        if _is_kind(value, type) and not _is_in_c(value):
            # Where a trace does not tell what runs, a name counts as a call.
            if self.visited.executed is None and not counts(_file_of(value)):
                refused = refused_in_python(value.__module__, value.__qualname__)
        elif isinstance(value, types.FunctionType):
            file = value.__code__.co_filename
            if self.visited.executed is None and not source.is_users(file) and not _is_of_text(value.__code__):
                # Not __module__: a decorator may have copied it.
                refused = refused_in_python(value.__globals__.get("__name__", ""), value.__name__)
        else:
            refused = refused_in_c(value)
        if refused:
            self.visited.doubt(f"the code names {refused}")

    def _sequence(self, value: Any) -> str:
        if len(value) > _MAX_LENGTH:
            return f"{self._unknown(value, 'it is long')} {len(value)}"
        entries = list(map(self.of, value))
        if isinstance(value, (set, frozenset)) and not all(isinstance(entry, (int, float)) for entry in value):
            # The order of strings in a set differs between processes.
            entries.sort()
        return f"{entries} {getattr(value, 'maxlen', '')} {self._further(value)}"

    def _mapping(self, value: Any) -> str:
        if len(value) > _MAX_LENGTH:
            return f"{self._unknown(value, 'it is long')} {len(value)}"
        factory = self.of(value.default_factory) if isinstance(value, collections.defaultdict) else ""
        entries = [(self.of(key), self.of(entry)) for key, entry in value.items()]
        return f"{entries} {factory} {self._further(value)}"

    def _further(self, container: Any) -> str:
        """Return the digest of what a container has besides its entries."""
        is_plain = type(container).__module__ in ("builtins", "collections") and not getattr(
            container, "__dict__", None
        )
        return "" if is_plain else self._parts(container)

    def _attributes(self, value: Any, without: Collection[str] = ()) -> str:
        """Return the digest of the attributes of a function, or of a tensor; empty without any."""
        named = getattr(value, "__dict__", {}).items()
        attributes = {name: entry for name, entry in named if name not in without and not name.startswith(_OF_DYNAMO)}
        return self.of(attributes) if attributes else ""

    def _tensor(self, value: Tensor) -> str:
        content = ""
        if id(value) in self.visited.own:
            return f"of the graph {self.visited.own[id(value)]}"
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta:
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            content = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
        else:
            self._unknown(value)
        gradient = self.of(value.grad) if value.is_leaf and value.grad is not None else ""
        layout = value.stride() if value.layout is torch.strided else value.layout
        kind = f"{tuple(value.shape)} {layout} {value.dtype} {value.device} {value.requires_grad}"
        return f"{kind} {content} {gradient} {self._attributes(value)}"

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        head = f"{function.__module__} {function.__qualname__} {self.of(code)}"
        if _is_of_text(code):
            of_all = self.visited.executed is None
            return f"{head} {self._values_of(function) if of_all else self.everything_of(function)}"
        if (original := compiled_original(function)) is not None:
            return f"{head} {self.of(original)}"
        if not counts(code.co_filename) and not hasattr(function, "__wrapped__"):
            return head
        return f"{head} {self._values_of(function)}"

    def _values_of(self, function: types.FunctionType) -> str:
        cells = [_cell(cell) for cell in function.__closure__ or ()]
        self.visited.functions.setdefault(function.__code__, []).append(tuple(cells))
        values = [function.__defaults__, function.__kwdefaults__, cells, getattr(function, "__wrapped__", None)]
        own = self._attributes(function, ("__wrapped__", "__signature__"))
        return f"{list(map(self.of, values))} {own} {self._globals(function)}"

    def _globals(self, function: types.FunctionType) -> list[str]:
        executed, code = self.visited.executed, function.__code__
        if executed is None:
            for name in sorted(names_in(code) & REFLECTION):
                self.visited.doubt(f"{function.__qualname__} names {name}")
        elif name_of(code, function.__globals__.get("__name__", "")) not in executed:
            return []
        before, self._is_torchs = self._is_torchs, not source.is_users(code.co_filename) and not _is_of_text(code)
        try:
            return [f"{name}={self.of(value)}" for name, value in named_values(function)]
        finally:
            self._is_torchs = before

    def everything_of(self, value: Any) -> str:
        """Return the digest of a value with the globals of all functions that it leads to, whether they ran or not."""
        digest = self if self.visited.executed is None else self._of_everything
        depth, digest._depth = digest._depth, 0
        try:
            return digest.of(value)
        finally:
            digest._depth = depth

    @functools.cached_property
    def _of_everything(self) -> Digest:
        """Digests each object once for all calls: what functions lead to leads back to most of it."""
        return Digest(replace(self.visited, executed=None))

    def _code(self, code: types.CodeType) -> str:
        self.visited.codes.add(code)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.visited.parents[constant] = code
        # The line numbers count: messages and views show them.
        table = hashlib.sha256(code.co_code + code.co_linetable + code.co_exceptiontable).hexdigest()
        constants = [self.of(constant) for constant in code.co_consts]
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        return f"{table} {code.co_firstlineno} {code.co_flags} {counts} {constants} {names}"

    def _method(self, method: types.MethodType) -> str:
        return f"{self.of(method.__func__)} {self.of(method.__self__)}"

    def _class(self, cls: type) -> str:
        """Return the digest of a class: the names in it and in its bases, and the values of those that are no code.

        Its functions are digested where they ran. Where all counts they are digested here.
        """
        texts = [f"{cls.__module__}.{cls.__qualname__}"]
        if counts(_file_of(type(cls))):
            texts.append(self.of(type(cls)))
        for kind in cls.__mro__:
            if not counts(_file_of(kind)) or not _OURS.isdisjoint(vars(kind)):
                continue
            entries = {name: untagged(entry) for name, entry in sorted(vars(kind).items()) if name not in _OF_CLASSES}
            texts.append(f"{kind.__qualname__}: {' '.join(entries)}")
            with_code = self.visited.executed is None or issubclass(kind, torch.autograd.Function)
            for name, entry in entries.items():
                is_code = isinstance(entry, (types.FunctionType, *_CODES))
                if is_code and (with_code or _is_of_text(getattr(entry, "__code__", None))):
                    texts.append(f"{name}={self.everything_of(entry)}")
                elif isinstance(entry, types.FunctionType) and entry.__code__.co_freevars not in ((), ("__class__",)):
                    # A decorator of the class has made it.
                    texts.append(f"{name}={self.of(entry)}")
                elif not is_code and not _is_kind(entry, type):
                    texts.append(f"{name}={self.of(entry)}")
        return " ".join(texts)

    def _module(self, module: nn.Module) -> str:
        # What the graph holds is compared by itself. Several modules may have one class.
        name = self.visited.own.get(id(module))
        return self._parts(module) if name is None else f"{name} {self.of(type(module))}"

    def _package(self, module: types.ModuleType) -> str:
        package = sys.modules.get(module.__name__.partition(".")[0])
        return f"{module.__name__} {getattr(package, '__version__', '')}"

    def _object(self, value: Any) -> str:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if id(value) in self.visited.own:
            return "the graph"
        if name in _TEXTS or isinstance(value, (PurePath, OpOverload)) or kind.__module__ in ("datetime", "torch._ops"):
            return f"{name} {value!r}"
        if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
            return f"{name} {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, logging.Logger):
            return f"{name} {value.name} {value.level} {value.disabled}"
        if name.startswith(_WITHOUT_VALUE) or kind is object:
            return f"object of {name}"
        if isinstance(value, type(os.environ)):
            # A trace notes the variables that it reads.
            return name
        if isinstance(value, threading.local):
            return self._parts(value)
        if isinstance(value, contextlib.nullcontext):
            return f"{name} {self.of(value.enter_result)}"
        if isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            return self._unknown(value)
        if isinstance(value, weakref.ref):
            return f"{name} {self.of(value())}"
        if isinstance(value, contextvars.ContextVar):
            return f"{name} {value.name} {self.of(value.get(None))}"
        if isinstance(value, contextlib._GeneratorContextManager):
            # A decorator: each call makes the generator anew.
            return f"{name} {self.of([value.func, value.args, value.kwds])}"
        if isinstance(value, dataclasses.Field):
            return f"{name} {value.name} {self.of([value.default, value.default_factory])}"
        if name in ("types.SimpleNamespace", "argparse.Namespace"):
            return f"{name} {[(key, self.of(entry)) for key, entry in sorted(vars(value).items())]}"
        is_torchs = kind.__module__.partition(".")[0] == "torch" and not isinstance(value, _CHANGING)
        if not (counts(_file_of(kind)) or (is_torchs and hasattr(value, "__dict__"))):
            return self._unknown(value)
        return self._parts(value)

    def _parts(self, value: Any) -> str:
        """Return the digest of an object's class and attributes."""
        if (kind := _state_in_c(type(value))) is not None:
            self._unknown(value, f"{kind.__qualname__} keeps its value in C")
        attributes = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            names = [_mangled(kind, name) for name in ([slots] if isinstance(slots, str) else slots)]
            attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
        # Sorted: some classes set their attributes in the order of a set.
        shown = [f"{name}={self.of(entry)}" for name, entry in sorted(attributes.items()) if name not in _OF_PROCESS]
        return f"object of {self.of(type(value))} {shown}"


# In order: the first type that fits counts.
_TEXT: dict[type, Callable[[Digest, Any], str]] = {
    Tensor: Digest._tensor,
    dict: Digest._mapping,
    types.MappingProxyType: Digest._mapping,
    list: Digest._sequence,
    tuple: Digest._sequence,
    set: Digest._sequence,
    frozenset: Digest._sequence,
    collections.deque: Digest._sequence,
    types.FunctionType: Digest._function,
    types.CodeType: Digest._code,
    types.MethodType: Digest._method,
    staticmethod: lambda digest, value: digest.of(value.__func__),
    classmethod: lambda digest, value: digest.of(value.__func__),
    property: lambda digest, value: digest.of([value.fget, value.fset, value.fdel]),
    functools.cached_property: lambda digest, value: digest.of(value.func),
    functools.partial: lambda digest, value: digest.of([value.func, value.args, value.keywords, vars(value)]),
    type: Digest._class,
    types.ModuleType: Digest._package,
    nn.Module: Digest._module,
}


def _is_kind(value: Any, kind: type) -> bool:
    """Return ``isinstance(value, kind)`` without reading attributes of the value, which may warn."""
    return issubclass(type(value), kind)


def _is_of_text(code: types.CodeType | None) -> bool:
    """Return whether code was compiled from a string: no trace follows it."""
    return code is not None and code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen")


def _is_in_c(cls: type) -> bool:
    """Return whether a class is written in C."""
    in_c = cls.__module__ in sys.builtin_module_names or _file_of(cls).endswith((".so", ".pyd"))
    return in_c or not cls.__flags__ & _HEAP_TYPE


def _state_in_c(cls: type) -> type | None:
    """Return the base of a class in Python whose objects keep a value in C that is not known; None without one."""
    return next((base for base in cls.__mro__ if _is_in_c(base) and base not in _KNOWN_IN_C), None)


def _mangled(cls: type, name: str) -> str:
    """Return the name under which a class keeps one of its slots."""
    private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name


def _is_bindings(owner: Any) -> bool:
    """Return whether a function in C is a part of a library's bindings, and bound to no object of the user."""
    return type(owner).__module__.startswith("pybind11") or type(owner).__name__ == "PyCapsule"


def _file_of(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or "<"


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
