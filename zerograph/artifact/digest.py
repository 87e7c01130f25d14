"""Digests of Python values, equal in two processes where the values are: numbers, tensors, functions, classes, objects.

A function counts by its code, its default arguments and the values in its closure; a class by its entries; an object by
its class and by the state that pickle would save. What a digest cannot tell of a value is a doubt: an object of a
library in C, for instance, counts by its type only. Code counts as it is in the process, not by its file, which may
have been edited since it was imported.

Nothing is followed from a function to the globals that it names: those of the functions that a trace runs are values by
themselves, see :mod:`zerograph.artifact.code`. Functions that no trace is seen to run are digested with their globals
by :meth:`Digest.everything_of`.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copyreg
import enum
import functools
import hashlib
import itertools
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zerograph._torch import compiled_original, is_inherited, operator_functions, untagged
from zerograph.artifact.allowed import REFLECTION, is_bindings, refused_in_c, refused_in_python
from zerograph.base import source
from zerograph.base.names import named_values, names_in, with_inner
from zerograph.base.sizes import LARGE
from zerograph.capture.places import PLAIN, WRAPPERS, object_attributes, parts

_NN, _OPTIM = (str(Path(torch.__file__).parent / name) + os.sep for name in ("nn", "optim"))
# Packages with which torch itself computes; what they have cached differs between processes.
_OF_TORCH = ("mpmath", "networkx", "numpy", "sympy")
# Attributes whose values differ between processes: transformers keeps a hash of strings.
_OF_PROCESS = ("_original_object_hash",)
# Dynamo numbers the functions that it does not compile.
_OF_DYNAMO = "_torchdynamo_"
# What containers have besides their entries.
_FURTHER = ((collections.deque, "maxlen"), (collections.defaultdict, "default_factory"))
# Objects whose text tells all that counts of them.
_TEXTS = (PurePath, itertools.count)
# Objects without a value that a trace could read.
_WITHOUT_VALUE = ("_thread.lock", "_thread.RLock", "warnings.", "typing.", "abc.", "_collections._tuplegetter")
# Entries that transformers adds to classes of torch when it first needs them; where a trace runs them, they count.
ADDED = frozenset({"smart_apply"})
# Entries of classes that differ between processes, or say nothing.
_OF_CLASSES = ADDED | frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slotnames__"),
        *("__abstractmethods__", "__orig_bases__", "__parameters__", "__slots__", "__hash__", "__dataclass_params__"),
        *("_abc_impl", "___needs_generation_tag_patch", "___has_generation_tag_patch"),
    }
)
# Entries of the classes that zerograph gives prepared modules, and parameters: to a trace they are their bases.
_OURS = frozenset({"_zerograph_prepared", "_zerograph_holder"})
# Longer containers, and objects nested deeper, are digested by their type and length.
_MAX_LENGTH, _MAX_DEPTH = 10_000, 100
# Types of what has no value besides its name, and the object that it belongs to.
_NAMED = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(functools._lru_cache_wrapper, type(np.sqrt), type(np.mean)),
)
# Objects of torch whose values change with every step, or are code that cannot be read.
_CHANGING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Generator)
_COMPILED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
_HEAP_TYPE = 1 << 9


def counts(filename: str) -> bool:
    """Return whether code of a file is digested: that of users, of installed packages and of ``torch.nn``."""
    if any(f"{os.sep}site-packages{os.sep}{package}{os.sep}" in filename for package in _OF_TORCH):
        return False
    return source.is_users(filename) or filename.startswith(_NN)


def short(text: str) -> str:
    """Return a digest of text, with which digests and messages stay short."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Digest:
    """Digests values, each object once.

    Args:
        own: names of the graph, its modules and their tensors, by ``id``, which are compared by themselves.

    Attributes:
        doubts: values that a digest does not tell whole, as text.
        codes: the code of all functions seen, with that of the functions inside.
        cells: what is in the closures of the functions seen as objects, by their code.
        memos: functions that keep their results, and how many.
        silent: what code of torch calls is compared, or changes no graph, so it is no doubt.
    """

    def __init__(self, own: Mapping[int, str] | None = None) -> None:
        self.doubts: dict[str, None] = {}
        self.codes: set[types.CodeType] = set()
        self.cells: dict[types.CodeType, list[list[Any]]] = {}
        self.memos: list[tuple[types.FunctionType, int]] = []
        self.silent = False
        self._own = own or {}
        # Functions are digested with the globals that they name.
        self._follows_globals = False
        # Digests by ``id`` and with globals or without, and the objects, which keep these.
        self._seen: dict[tuple[int, bool], str] = {}
        self._kept: list[Any] = []
        self._depth = 0

    def of(self, value: Any) -> str:
        """Return the digest of a value. Objects that refer to themselves are digested up to the reference."""
        if isinstance(value, PLAIN) and type(value).__module__ in ("builtins", "torch"):
            return f"{type(value).__name__} {value!r}"
        # Also where it was seen before: torch's own functions may have named it.
        self._note_call(value)
        key = id(value), self._follows_globals
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
            self._seen[key] = short(text)
        return self._seen[key]

    def everything_of(self, value: Any) -> str:
        """Return the digest of a value with the globals of all functions that it leads to, whether they ran or not."""
        before = self._depth, self._follows_globals, self.silent
        self._depth, self._follows_globals, self.silent = 0, True, self.silent and self._follows_globals
        try:
            return self.of(value)
        finally:
            self._depth, self._follows_globals, self.silent = before

    def _unknown(self, value: Any, why: str = "its value cannot be compared") -> str:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        self.doubts[f"an object of {name}: {why}"] = None
        return f"object of {name}"

    def _text(self, value: Any) -> str:
        if value is sys.modules:
            self.doubts["the code names sys.modules"] = None
        if isinstance(value, enum.Enum):
            own = {name: entry for name, entry in sorted(vars(value).items()) if name != "__objclass__"}
            return f"{type(value).__module__}.{type(value).__qualname__} {self.of(own)}"
        if isinstance(value, PLAIN):
            # Of a class of its own.
            kind: Any = next(kind for kind in PLAIN if isinstance(value, kind))
            return f"{kind.__repr__(value)} {self._parts(value)}"
        for kind, text in _TEXT.items():
            if isinstance(value, kind):
                return f"{type(value).__qualname__} {text(self, value)}"
        if (functions := operator_functions(value)) is not None:
            return f"{value!r} {self.of(functions)}"
        return self._named_function(value) if isinstance(value, _NAMED) else self._object(value)

    def _named_function(self, value: Any) -> str:
        """Return the digest of a function in C, of a descriptor, or of a function whose results are kept."""
        owner = getattr(value, "__self__", None)
        is_bound = not (owner is None or isinstance(owner, (types.ModuleType, type)) or is_bindings(owner))
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(value, functools._lru_cache_wrapper) and isinstance(wrapped, types.FunctionType):
            self.memos.append((wrapped, value.cache_info().currsize))
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
        of = getattr(getattr(value, "__objclass__", None), "__qualname__", "")
        inside = "" if wrapped is None else self.everything_of(wrapped)
        attributes = self._attributes(value, ("__wrapped__", "cache_parameters"))
        bound = self.of(owner) if is_bound else ""
        return f"{type(value).__name__} {getattr(value, '__module__', '')}.{of}.{name} {bound} {inside} {attributes}"

    def _note_call(self, value: Any) -> None:
        """Note a doubt about what may read something that is not compared, or keeps state in C."""
        refused = ""
        if self.silent:
            return
        # Not isinstance(), which reads attributes of the value, and may warn.
        if issubclass(type(value), type) and not _is_in_c(value):
            # Where a trace does not tell what runs, a name counts as a call.
            if self._follows_globals and not counts(_file_of(value)):
                refused = refused_in_python(value.__module__, value.__qualname__)
        elif isinstance(value, types.FunctionType):
            file = value.__code__.co_filename
            if self._follows_globals and not source.is_users(file) and not _is_of_text(value.__code__):
                # Not __module__: a decorator may have copied it.
                refused = refused_in_python(value.__globals__.get("__name__", ""), value.__name__)
        elif isinstance(value, (type, types.BuiltinFunctionType, types.MethodDescriptorType)):
            refused = refused_in_c(value)
        if refused:
            self.doubts[f"the code names {refused}"] = None

    def _container(self, value: Any) -> str:
        if len(value) > _MAX_LENGTH:
            return f"{self._unknown(value, 'it is long')} {len(value)}"
        if not isinstance(value, (set, frozenset)):
            entries = [f"{self.of(key)}={self.of(entry)}" for (_, key), entry in parts(value)]
        else:
            entries = list(map(self.of, value))
            if not all(isinstance(entry, (int, float)) for entry in value):
                # The order of strings in a set differs between processes.
                entries.sort()
        further = [self.of(getattr(value, name)) for kind, name in _FURTHER if isinstance(value, kind)]
        is_plain = type(value).__module__ in ("builtins", "collections") and not getattr(value, "__dict__", None)
        return f"{entries} {further} {'' if is_plain else self._parts(value)}"

    def _attributes(self, value: Any, without: Collection[str] = ()) -> str:
        """Return the digest of the attributes of a function, or of a tensor; empty without any."""
        named = getattr(value, "__dict__", {}).items()
        attributes = {name: entry for name, entry in named if name not in without and not name.startswith(_OF_DYNAMO)}
        return self.of(attributes) if attributes else ""

    def _tensor(self, value: Tensor) -> str:
        content = ""
        if id(value) in self._own:
            return f"of the graph {self._own[id(value)]}"
        is_dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta
        if is_dense and value.nbytes <= LARGE:
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
        if _is_of_text(code) and not self._follows_globals:
            return self.everything_of(function)
        defaults = [self.of(value) for value in (function.__defaults__, function.__kwdefaults__)]
        head = f"{function.__module__} {function.__qualname__} {self.of(code)} {defaults}"
        if (original := compiled_original(function)) is not None:
            return f"{head} {self.of(original)}"
        is_followed = counts(code.co_filename) or _is_of_text(code)
        if not is_followed and not hasattr(function, "__wrapped__"):
            return head
        cells = [_cell(cell) for cell in function.__closure__ or ()]
        self.cells.setdefault(code, []).append(cells)
        inside = f"{list(map(self.of, cells))} {self.of(getattr(function, '__wrapped__', None))}"
        own = self._attributes(function, ("__wrapped__", "__signature__"))
        return f"{head} {inside} {own} {self._globals(function) if is_followed and self._follows_globals else ''}"

    def _globals(self, function: types.FunctionType) -> list[str]:
        code = function.__code__
        for name in sorted(names_in(code) & REFLECTION):
            self.doubts[f"{function.__qualname__} names {name}"] = None
        before, self.silent = self.silent, not source.is_users(code.co_filename) and not _is_of_text(code)
        try:
            return [f"{name}={self.of(value)}" for name, value in named_values(function.__globals__, code)]
        finally:
            self.silent = before

    def _code(self, code: types.CodeType) -> str:
        self.codes.update(with_inner(code))
        return _code_text(code)

    def _class(self, cls: type) -> str:
        """Return the digest of a class: the names and values in it and in its bases."""
        texts = [f"{cls.__module__}.{cls.__qualname__}"]
        if counts(_file_of(type(cls))):
            texts.append(self.of(type(cls)))
        for kind in cls.__mro__:
            file = _file_of(kind)
            if (counts(file) or file.startswith(_OPTIM)) and _OURS.isdisjoint(vars(kind)):
                texts.append(f"{kind.__module__}.{kind.__qualname__}:")
                # No trace follows the code of a function of autograd.
                digested = self.everything_of if issubclass(kind, torch.autograd.Function) else self.of
                for name, entry in sorted(vars(kind).items()):
                    if name not in _OF_CLASSES and not is_inherited(kind, entry):
                        texts.append(f"{name}={digested(untagged(entry))}")
        return " ".join(texts)

    def _module(self, module: nn.Module) -> str:
        # What the graph holds is compared by itself. Several modules may have one class.
        name = self._own.get(id(module))
        return self._parts(module) if name is None else f"{name} {self.of(type(module))}"

    def _package(self, module: types.ModuleType) -> str:
        package = sys.modules.get(module.__name__.partition(".")[0])
        return f"{module.__name__} {getattr(package, '__version__', '')}"

    def _object(self, value: Any) -> str:
        kind = type(value)
        name, package = f"{kind.__module__}.{kind.__qualname__}", kind.__module__.partition(".")[0]
        if id(value) in self._own:
            return "the graph"
        if isinstance(value, _TEXTS) or kind.__module__ == "torch._ops":
            return f"{name} {value!r}"
        if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
            if value.nbytes > LARGE:
                return self._unknown(value, "it is large")
            return f"{name} {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, logging.Logger):
            return f"{name} {value.name} {value.level} {value.disabled}"
        # A trace notes the environment variables that it reads.
        if name.startswith(_WITHOUT_VALUE) or kind is object or isinstance(value, type(os.environ)):
            return f"object of {name}"
        if isinstance(value, weakref.ref):
            return f"{name} {self.of(value())}"
        if isinstance(value, contextvars.ContextVar):
            return f"{name} {value.name} {self.of(value.get(None))}"
        if isinstance(value, contextlib._GeneratorContextManager):
            # A decorator: each call makes the generator anew.
            return f"{name} {self.of([value.func, value.args, value.kwds])}"
        is_torchs = package == "torch" and hasattr(value, "__dict__")
        if not (counts(_file_of(kind)) or is_torchs or package in sys.stdlib_module_names):
            return self._unknown(value)
        if isinstance(value, (*_CHANGING, *_COMPILED)):
            return self._unknown(value)
        if isinstance(value, threading.local) or not any(_is_in_c(base) for base in kind.__mro__[:-1]):
            return self._parts(value)
        reduce = copyreg.dispatch_table.get(kind, lambda value: value.__reduce_ex__(4))
        if package not in sys.stdlib_module_names and any(
            isinstance(getattr(kind, name, None), types.FunctionType) for name in _SAVES
        ):
            # The class may leave out what it can compute again.
            return self._unknown(value)
        try:
            saved = reduce(value)
        except TypeError:
            return self._unknown(value)
        return f"{name} {saved if isinstance(saved, str) else self.of(saved[1:3])} {self._parts(value)}"

    def _parts(self, value: Any) -> str:
        """Return the digest of an object's class and attributes."""
        attributes = sorted(object_attributes(value).items())
        # Sorted: some classes set their attributes in the order of a set.
        shown = [f"{name}={self.of(entry)}" for name, entry in attributes if name not in _OF_PROCESS]
        return f"object of {self.of(type(value))} {shown}"


# By these a class decides what pickle saves.
_SAVES = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
# In order: the first type that fits counts.
_TEXT: dict[type, Callable[[Digest, Any], str]] = {
    Tensor: Digest._tensor,
    **dict.fromkeys((dict, types.MappingProxyType, list, tuple, set, frozenset, collections.deque), Digest._container),
    types.FunctionType: Digest._function,
    types.CodeType: Digest._code,
    **dict.fromkeys(WRAPPERS, lambda digest, value: f"{[digest.of(part) for _, part in parts(value)]}"),
    type: Digest._class,
    types.ModuleType: Digest._package,
    nn.Module: Digest._module,
}


def _is_of_text(code: types.CodeType) -> bool:
    """Return whether code was compiled from a string: no trace follows it."""
    return code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen")


@functools.cache
def _code_text(code: types.CodeType) -> str:
    """Return the digest of code. The line numbers count: messages and views show them."""
    table = hashlib.sha256(code.co_code + code.co_linetable + code.co_exceptiontable).hexdigest()
    constants = [
        _code_text(one)
        if isinstance(one, types.CodeType)
        else sorted(map(repr, one))
        if type(one) is frozenset
        else one
        for one in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return f"{table} {code.co_firstlineno} {code.co_flags} {counts} {constants} {names}"


def _is_in_c(cls: type) -> bool:
    """Return whether a class is written in C."""
    in_c = cls.__module__ in sys.builtin_module_names or _file_of(cls).endswith((".so", ".pyd"))
    return in_c or not cls.__flags__ & _HEAP_TYPE


def _file_of(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or "<"


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
