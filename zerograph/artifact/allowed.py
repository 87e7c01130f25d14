"""The functions that the code of a trace may call outside of itself: their results follow from arguments alone.

This is a list of what is allowed. A step is not kept if its code calls, or names, anything else of Python's standard
library, of torch, numpy or zerograph, or of a library in C: it may read a clock, a file, the machine, the process or a
setting, which another process does not have. Settings of torch that are compared, see
:mod:`zerograph.artifact.process`, may be read.
"""

from __future__ import annotations

import builtins
import functools
import types
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Modules and classes in C. All their functions are allowed but for those of _REFUSED.
_IN_C = _words("""
    _abc _bisect _codecs _collections _contextvars _decimal _functools _heapq _json _operator _sre _statistics
    _string _struct _typing _warnings _weakref abc binascii builtins cmath collections contextlib copyreg
    dataclasses decimal enum fractions functools itertools math mpmath numpy numpy._core._multiarray_umath
    numpy.dtype numpy.ndarray operator re sympy torch.Size torch.SymBool torch.SymFloat torch.SymInt torch.Tensor
    torch._C.TensorBase torch._C._FunctionBase torch._C._VariableFunctions torch._C._fft torch._C._functions
    torch._C._linalg torch._C._nested torch._C._nn torch._C._return_types torch._C._sparse torch._C._special
    torch._ops torch.autograd.function torch.device torch.dtype torch.finfo torch.iinfo torch.layout
    torch.memory_format torch.nn.parameter.Parameter torch.return_types types typing unicodedata weakref zerograph
""")
# Functions and classes that keep state of their own, or read files, settings or text.
_REFUSED = _words("""
    __import__ _get_promotion_state breakpoint compile coroutine errstate eval exec frame from_file fromfile
    fromregex generator genfromtxt get_printoptions getbufsize geterr geterrcall input load loadtxt memmap module
    open random seterr
""")
# Functions of other modules in C. What those of torch read is compared, or is the same in each process that traces.
_FUNCTIONS_IN_C = _words("""
    _contextvars.ContextVar.get _contextvars.ContextVar.reset _contextvars.ContextVar.set _thread.RLock
    _thread.RLock.__enter__ _thread.RLock.__exit__ _thread.RLock.acquire _thread.RLock.release _thread._local
    _thread.allocate_lock _thread.get_ident _thread.lock.__enter__ _thread.lock.__exit__ _thread.lock.acquire
    _thread.lock.release _weakref.proxy _weakref.ref nt.fspath posix.fspath sys.exc_info sys.intern
    torch._C._are_functorch_transforms_active torch._C._disabled_torch_function_impl torch._C._get_cudnn_enabled
    torch._C._get_flash_sdp_enabled torch._C._get_math_sdp_enabled torch._C._get_mem_efficient_sdp_enabled
    torch._C._get_tracing_state torch._C._has_torch_function torch._C._has_torch_function_unary
    torch._C._has_torch_function_variadic torch._C._is_torch_function_mode_enabled torch._C._log_api_usage_once
    torch._C._set_grad_enabled torch._C.get_autocast_dtype torch._C.get_default_dtype torch._C.is_anomaly_enabled
    torch._C.is_autocast_cpu_enabled torch._C.is_autocast_enabled torch._C.is_grad_enabled
    torch._C.is_inference_mode_enabled
""")
# Modules in Python, with the modules inside of them. Functions of zerograph replace some of torch's in a trace.
_IN_PYTHON = _words("""
    _collections_abc _pydecimal _pytest _weakrefset abc bisect codecs collections contextlib copy copyreg
    dataclasses decimal enum fractions functools genericpath heapq itertools json keyword math mpmath ntpath numbers
    numpy._core numpy.fft numpy.lib numpy.linalg numpy.ma numpy.polynomial operator os posixpath re reprlib
    statistics string sympy textwrap torch._C torch._VF torch._compile torch._decomp torch._dynamo torch._functorch
    torch._higher_order_ops torch._jit_internal torch._library torch._linalg_utils torch._lowrank
    torch._meta_registrations torch._ops torch._prims torch._prims_common torch._refs
    torch._subclasses torch._tensor torch._utils torch._vmap_internals
    torch.amp torch.autograd torch.compiler torch.cpu.amp torch.cuda.amp
    torch.distributions torch.fft torch.func torch.functional torch.fx torch.library torch.linalg torch.masked
    torch.nested torch.nn torch.optim torch.overrides torch.return_types torch.special torch.types
    torch.utils._contextlib torch.utils._cxx_pytree torch.utils._pytree torch.utils.checkpoint torch.utils.hooks
    torch.utils.weak types typing typing_extensions unittest.mock weakref zerograph
""")
_REFUSED_IN_PYTHON = _words("""
    numpy._core._ufunc_config numpy._core.arrayprint numpy._core.memmap numpy._core.records numpy.lib._datasource
    numpy.lib._format_impl numpy.lib._npyio_impl numpy.lib._utils_impl numpy.lib.format numpy.lib.introspect
    numpy.lib.npyio torch.autograd.anomaly_mode torch.autograd.profiler torch.nn.parallel zerograph.graph
    zerograph.inspection zerograph.runtime zerograph.state
""")
# Functions of other modules in Python: messages, and what torch says of settings that are compared.
_FUNCTIONS_IN_PYTHON = _words("""
    importlib._bootstrap._handle_fromlist importlib._bootstrap.parent inspect.isclass inspect.isfunction
    inspect.ismethod inspect.parameters inspect.signature inspect.unwrap logging.critical logging.debug
    logging.error logging.exception logging.getLogger logging.info logging.log logging.warn logging.warn_explicit
    logging.warning torch._check torch._check_is_size torch.are_deterministic_algorithms_enabled
    torch.backends.mha.get_fastpath_enabled torch.compile torch.cuda.is_available
    torch.distributed.is_available torch.einsum zerograph.graph.__getattr__
    torch.get_default_device torch.get_float32_matmul_precision torch.is_deterministic_algorithms_warn_only_enabled
    torch.is_storage torch.is_tensor torch.jit._script.is_scripting torch.jit._trace.is_tracing torch.jit.annotate
    torch.jit.is_scripting torch.jit.is_tracing torch.random.fork_rng torch.random.manual_seed torch.sym_float
    torch.sym_int torch.sym_ite torch.sym_max torch.sym_min torch.sym_not torch.sym_sum warnings.__enter__
    warnings.__exit__ warnings.__init__ warnings.catch_warnings warnings.filterwarnings warnings.simplefilter
    warnings.warn
""")
# Names by which code reaches what no name leads to: values of the caller, globals of other functions, texts.
REFLECTION = _words("""
    __annotations__ __builtins__ __cached__ __closure__ __code__ __doc__ __getattribute__ __getstate__ __globals__
    __hash__ __loader__ __mro_entries__ __package__ __path__ __reduce__ __reduce_ex__ __sizeof__ __spec__
    __subclasses__ __traceback__ __weakref__ cr_frame f_back f_globals f_locals gi_frame tb_frame
""")


@functools.cache
def refused_in_python(module: str, name: str) -> str:
    """Return the name of a function of a module in Python that may not be called; empty if it may.

    Args:
        module: the module's name.
        name: the function's, or that of its class.
    """
    is_allowed = _is_in(module, _IN_PYTHON) and not _is_in(module, _REFUSED_IN_PYTHON) and name not in _REFUSED
    return "" if is_allowed or f"{module}.{name}" in _FUNCTIONS_IN_PYTHON else f"{module}.{name}"


def _is_in(module: str, modules: frozenset[str]) -> bool:
    """Return whether a module is one of these, or inside of one."""
    parts = module.split(".")
    return any(".".join(parts[: count + 1]) in modules for count in range(len(parts)))


@functools.cache
def _is_allowed_in_c(module: str, name: str, is_class: bool) -> bool:
    """Return whether a function or a class in C may be called; the arguments are what :func:`place_in_c` returns."""
    kind, _, method = name.rpartition(".")
    if module == "builtins" and not _is_builtin(name.partition(".")[0]):
        return False
    if kind.partition(".")[0] in _REFUSED or (method in _REFUSED and not kind):
        return False
    if f"{module}.{name}" in _FUNCTIONS_IN_C or module in _IN_C or (kind and f"{module}.{kind}" in _IN_C):
        return True
    # Objects of torch's classes are digested, or cannot be compared.
    return module.partition(".")[0] == "torch" and is_class


def _is_builtin(name: str) -> bool:
    """Return whether Python has a function or a type of this name. Some libraries give no module for theirs."""
    return hasattr(builtins, name) or name in _TYPES or name.startswith("dict_") or name.endswith("iterator")


_TYPES = frozenset(kind.__name__ for kind in vars(types).values() if isinstance(kind, type))


def place_in_c(function: Any) -> tuple[str, str]:
    """Return the module of a function, a method or a class in C, and its name there: ``"math"``, ``"sqrt"``."""
    name = getattr(function, "__name__", "")
    if isinstance(function, type):
        return function.__module__, function.__qualname__
    owner = getattr(function, "__self__", getattr(function, "__objclass__", None))
    if isinstance(owner, types.ModuleType):
        return owner.__name__, name
    if getattr(function, "__qualname__", "").startswith("_VariableFunctionsClass."):
        return "torch._C._VariableFunctions", name
    if owner is None or is_bindings(owner):
        return getattr(function, "__module__", None) or "builtins", name
    kind = owner if isinstance(owner, type) else type(owner)
    # A class of the user may inherit the method, or override it.
    bases = (base for base in kind.__mro__ if not isinstance(vars(base).get(name, place_in_c), types.FunctionType))
    kind = next(bases, kind)
    return kind.__module__, f"{kind.__qualname__}.{name}"


def is_bindings(owner: Any) -> bool:
    """Return whether a function in C is a part of a library's bindings, and bound to no object of the user."""
    return type(owner).__module__.startswith("pybind11") or type(owner).__name__ == "PyCapsule"


def refused_in_c(function: Any) -> str:
    """Return the name of a function or a class in C that may not be called; empty if it may."""
    module, name = place_in_c(function)
    return "" if _is_allowed_in_c(module, name, isinstance(function, type)) else f"{module}.{name}"
