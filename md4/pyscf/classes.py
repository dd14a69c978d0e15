"""Classes of PySCF that md4 puts together with its own, and their pickles; functions that it replaces."""

import sys
from functools import wraps


def class_parts(cls):
    """`cls` if it can be found by its name; else (name, parts of each base), for a class made by `lib.make_class`."""
    named = getattr(sys.modules.get(cls.__module__), cls.__qualname__, None)
    if named is cls or "__name_mixin__" not in vars(cls):
        return cls
    return cls.__name__, tuple(class_parts(base) for base in cls.__bases__)


def class_of(parts):
    """Inverse of `class_parts`."""
    from pyscf import lib

    if isinstance(parts, type):
        return parts
    name, bases = parts
    cls = lib.misc.make_class(tuple(class_of(base) for base in bases), name)
    cls.__module__ = cls.__bases__[-1].__module__
    return cls


def restored(parts):
    """An empty object of the class, for pickle to fill."""
    cls = class_of(parts)
    return cls.__new__(cls)


def replace(module, name, ours):
    """Has `ours`, with PySCF's function as its first argument, called in its place."""
    theirs = getattr(module, name)

    @wraps(theirs)
    def chosen(*args, **options):
        return ours(theirs, *args, **options)

    setattr(module, name, chosen)


class Restorable:
    """For pickle, which cannot find a class made by `lib.set_class` by its name: the classes behind it."""

    def __reduce_ex__(self, protocol):
        return restored, (class_parts(type(self)),), self.__getstate__()


def in_front(obj, mixin):
    """`obj`, changed in place so that `mixin` is in front of its class, once."""
    from pyscf import lib

    return obj if isinstance(obj, mixin) else lib.set_class(obj, (mixin, type(obj)))


def with_mixin(cls, mixin):
    """The class `cls` with `mixin` in front; beneath density fitting, whose K may be that of the class beneath it."""
    from pyscf.df.df_jk import _DFHF
    from pyscf.lib.misc import make_class

    if not issubclass(cls, _DFHF):
        return make_class((mixin, cls))
    first, *rest = cls.__bases__
    made = make_class((first, *(with_mixin(base, mixin) for base in rest)))
    made.__module__ = cls.__module__
    return made
