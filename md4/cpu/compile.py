"""Compiled loops of the CPU, which are kept on disk by `md4.support.cache`. They release the interpreter's lock.

Numba's own disk cache is not used, for three reasons. It looks at one source file only and misses an edit of another
file. Two processes can leave its index wrong. It needs a folder to which it can write.
"""

import _thread
import hashlib
import pickle
from types import FunctionType

from numba import njit, typeof
from numba.core.caching import NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompilerBase, CompileResult
from numba.core.compiler_machinery import register_pass
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.typed_passes import NativeLowering

from md4.support import cache
from md4.support.threads import Share


class LoopCache(NullCache):
    """Disk cache of one function, as Numba's dispatchers use it.

    There is a file for each signature and processor. A file is a pickle, so it can execute anything when it is read.
    `md4.support.cache` makes sure that it was written by this user, or by one whom this user trusts.
    """

    def __init__(self, name):
        self.name = name

    def entry(self, signature, codegen):
        """(path, facts) of the code for a signature."""
        facts = {"loop": self.name, "signature": str(signature), "processor": [str(s) for s in codegen.magic_tuple()]}
        return cache.entry_path(f"{self.name}-{hashlib.sha256(cache.encoded(facts)).hexdigest()[:16]}.loop"), facts

    def load_overload(self, signature, target):
        """The code that `save_overload` saved, or None."""
        rtsys.initialize(target)  # all that code refers to; the rest of Numba is loaded when something is compiled
        data = cache.load(*self.entry(signature, target.codegen()))
        return None if data is None else CompileResult._rebuild(target, *pickle.loads(data))

    def save_overload(self, signature, result):
        """Saves the code that Numba compiled."""
        if not result.library.has_dynamic_globals:
            cache.store(*self.entry(signature, result.codegen), dumps(result._reduce()))


class PartLibrary(JITCodeLibrary):
    """LLVM's code of a function, and of those that it calls, which is neither optimised as a whole nor translated."""

    def finalize(self):
        """Links what the function calls."""
        for library in self._linking_libraries:
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class PartLowering(NativeLowering):
    """Makes a `PartLibrary` of a function. Numba's own pass also makes machine code, which nobody would call."""

    _name = "md4_part_lowering"

    def run_pass(self, state):
        """Numba's pass, and what it leaves out where there is no machine code."""
        state.library = PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        # Numba finds the code of a call by a builtin of Python's that the function has for itself.
        state.cr = state.cr._replace(cfunc=[].append)
        state.targetctx.insert_user_function(state.cr.cfunc, state.cr.fndesc, [state.library])
        return True


class PartCompiler(CompilerBase):
    """Numba's compiler with `PartLowering`."""

    def define_pipelines(self):
        """Numba's passes, with one exchanged."""
        (passes,) = Compiler.define_pipelines(self)
        passes.passes = [(PartLowering if one is NativeLowering else one, text) for one, text in passes.passes]
        passes.finalize()
        return [passes]


# Of all functions. Those that allocate no arrays need not count references: half of LLVM's code would do nothing else.
OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False}
OPTIONS_OF_PARTS = OPTIONS | {"no_cpython_wrapper": True, "pipeline_class": PartCompiler}

# Compiles a function that only compiled functions call.
helper = njit(**OPTIONS_OF_PARTS)

# Compiles a function whose code becomes part of the one that calls it, for the large ones that are called once. LLVM
# does this in a tenth of the time that Numba's own `inline` takes.
part = njit(**OPTIONS_OF_PARTS, forceinline=True)


def bound(function, name=None, make=helper, **callees):
    """A function compiled with some of its globals replaced by `callees`, which other compiled functions can call.

    They are globals, because Numba's pickles would contain them if they were in a closure.
    """
    name = name or function.__name__
    made = FunctionType(function.__code__, {**function.__globals__, **callees}, name)
    made.__qualname__, made.__module__ = name, function.__module__
    return make(made)


def kept(allocates, name):
    """Compiles a function that Python calls, and keeps the code on disk."""

    def make(function):
        dispatcher = njit(**OPTIONS | {"_nrt": allocates})(function)
        dispatcher._cache = LoopCache(name)
        dispatcher.compile = in_own_thread(dispatcher.compile)
        return dispatcher

    return make


def in_own_thread(compile_for):
    """`compile_for` in another thread, which an interrupt cannot reach.

    Numba's lock has an `__enter__` in Python; an interrupt at its end would leave it taken, and other threads would
    wait for it without end. After an interrupt the other thread finishes its work, whose result is kept.
    """

    def compile_there(signature):
        made = []
        share = Share(lambda _: made.append(compile_for(signature)), 0)
        _thread.start_new_thread(share.run, ())
        share.wait(begun=True)
        if share.error is not None:
            raise share.error
        return made[0]

    return compile_there


class Loop:
    """A function that is compiled at its first call for each signature, or then read from disk.

    Parameters
    ----------
    function : callable
        The function.
    name : str, optional
        The name of its files on disk; by default that of the function.
    allocates : bool
        Whether it makes arrays.
    callees
        Compiled functions that it calls by these names; see `bound`.
    """

    def __init__(self, function, name=None, allocates=False, **callees):
        self.name = name or function.__name__
        self.dispatcher = bound(function, self.name, kept(allocates, self.name), **callees)

    def __call__(self, *args):
        return self.dispatcher(*args)

    def compile(self, args):
        """Compiles the function for arguments of these types, or reads it from disk."""
        self.dispatcher.compile(tuple(map(typeof, args)))

    def is_kept(self, args):
        """Whether this process or the disk cache has it for arguments of these types."""
        return tuple(map(typeof, args)) in self.dispatcher.overloads or self.is_on_disk(args)

    def is_on_disk(self, args):
        """Whether the disk cache has it for arguments of these types."""
        codegen = self.dispatcher.targetdescr.target_context.codegen()
        return self.dispatcher._cache.entry(tuple(map(typeof, args)), codegen)[0].exists()
