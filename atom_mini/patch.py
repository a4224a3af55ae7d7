"""`@patch` adds a method to its class from a cell of its own: for the notebooks.

The first to use it is chapter 00c. `make export` moves each method into its class (nbs/_book/fold.py), so the
package is without it. As `nbdev_export` writes the package, methods are added when a module is imported.

It stands above all other decorators, which are written as inside a class. The first parameter names the class::

    @patch                            @patch                          @patch
    def step(self: LLM) -> None:      @property                       @LLM.limit.setter
        ...                           def limit(self: LLM) -> int:    def limit(self: LLM, value: int) -> None:

    @patch                                              @patch(LLM)
    @classmethod                                        @staticmethod
    def load(cls: type[LLM], path: str) -> LLM:         def clean(text: str) -> str:

Everything else is as in a class: `super()`, `@abstractmethod`, `@contextmanager`, `@torch.inference_mode()`, `async`,
`__init__`, `__new__` (whose `cls` is annotated as above), a dataclass's `__post_init__`, methods of a NamedTuple.
Two things are not: names like `self.__x`, which only a class body mangles (refused when exporting), and `super()` in a
function inside the method.
"""

from __future__ import annotations

import abc
import builtins
import functools
import sys
import typing
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

# A class body wraps these by itself.
_WRAPPED = {"__new__": staticmethod, "__init_subclass__": classmethod, "__class_getitem__": classmethod}


def patch(target: Any) -> Any:
    """Add the decorated method to its class; `@patch(SomeClass)` where no first parameter can name it.

    Raises TypeError if the class is not named. The method's name keeps the value it had outside the class: a builtin
    or a function of that name is not hidden.
    """
    return functools.partial(_add, cls=target) if isinstance(target, type) else _add(target)


def _add(member: Any, cls: object = None) -> object:
    layers = list(_layers(member))
    function, name = layers[-1], layers[-1].__name__
    cls = cls or _owner(function)
    if not isinstance(cls, type):
        raise TypeError(f"@patch: {name} names no class: write `self: SomeClass`, or @patch(SomeClass)")
    _bind_super(function, cls)
    for layer in layers:
        layer.__qualname__ = f"{cls.__qualname__}.{name}"
    _set(cls, name, _WRAPPED[name](member) if name in _WRAPPED else member)
    return function.__globals__.get(name, getattr(builtins, name, None))


def _layers(member: object) -> Iterator[FunctionType]:
    """The function that a property (its newest part), a classmethod or the like holds, and all that it wraps."""
    function: Any
    if isinstance(member, property):
        function = member.fset or member.fget
    else:
        function = getattr(member, "__func__", getattr(member, "func", member))
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _owner(function: FunctionType) -> object:
    """The class in the first parameter's annotation, `C` or `type[C]`, written out or as text."""
    first = function.__code__.co_varnames[: function.__code__.co_argcount][:1]
    hint = function.__annotations__.get(first[0]) if first else None
    hint = eval(hint, function.__globals__) if isinstance(hint, str) else hint
    return typing.get_args(hint)[0] if typing.get_origin(hint) is type else hint


def _bind_super(function: FunctionType, cls: type) -> None:
    """Let `super()` find the class: only code compiled inside a class body knows it.

    Out here `super` is a global name. The method looks up another one, under which stands the `super` of its class.
    """
    code, name = function.__code__, f"super of {cls.__qualname__}"
    if "super" not in code.co_names or "__class__" in code.co_freevars:
        return

    def super_of(*args: type) -> object:
        caller = sys._getframe(1)
        return super(*(args or (cls, caller.f_locals[caller.f_code.co_varnames[0]])))

    function.__globals__[name] = super_of
    function.__code__ = code.replace(co_names=tuple(name if n == "super" else n for n in code.co_names))


def _set(cls: type, name: str, member: object) -> None:
    """`setattr`, and what Python does only once, when a class statement ends."""
    late = name == "__post_init__" and "__dataclass_fields__" in cls.__dict__ and not hasattr(cls, name)
    setattr(cls, name, member)
    if hasattr(member, "__set_name__"):
        member.__set_name__(cls, name)
    if name == "__eq__" and "__hash__" not in cls.__dict__:
        cls.__hash__ = None  # type: ignore[assignment]
    if late:  # the generated __init__ did not know that there would be one
        cls.__init__ = _then_post_init(cls.__init__)  # type: ignore[misc]
    abc.update_abstractmethods(cls)
    cls.__dict__.get("__protocol_attrs__", set()).add(name)


def _then_post_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: object, **options: object) -> None:
        init(self, *args, **options)
        self.__post_init__()

    return __init__
