"""A model that is built once: each call gets modules of its own around the same tensors."""

from __future__ import annotations

import inspect

import pytest

from bnb_dispatch_fix.planning.construction import built_once


class Module:
    """What a torch module is made of."""

    def __init__(self):
        self._parameters, self._buffers, self._modules = {}, {}, {}


class Model(Module):
    built = 0

    def __init__(self, config, size=2):
        """Makes two modules, one under two names."""
        super().__init__()
        type(self).built += 1
        self.config = config
        self._parameters["weight"] = object()
        shared = Module()
        shared._buffers["table"] = object()
        self._modules.update(first=shared, again=shared, none=None)


class Child(Model):
    """Without an `__init__` of its own."""


@pytest.fixture(params=[Model, Child])
def model_class(request):
    request.param.built = 0
    return request.param


def test_it_is_built_once_and_copied(model_class):
    with built_once(model_class):
        one, other = model_class("a"), model_class("b")
        assert str(inspect.signature(model_class.__init__)) == "(self, config, size=2)"
    assert model_class.built == 1
    assert (one.config, other.config) == ("a", "b")
    assert one._parameters["weight"] is other._parameters["weight"]
    assert one._modules["first"] is not other._modules["first"]
    table = one._modules["first"]._buffers["table"]
    assert other._modules["first"]._buffers["table"] is table
    assert other._modules["first"] is other._modules["again"]
    assert other._modules["none"] is None


def test_what_becomes_of_one_does_not_become_of_another(model_class):
    with built_once(model_class):
        one = model_class("a")
        one._modules["first"] = one._modules["again"] = "converted"
        one.is_quantized = True
        other = model_class("b")
        other._modules["first"]._buffers.clear()
        third = model_class("c")
    assert not hasattr(other, "is_quantized")
    assert isinstance(third._modules["first"], Module)
    assert third._modules["first"]._buffers


def test_afterwards_everything_is_built_anew(model_class):
    own = vars(model_class).get("__init__")
    with built_once(model_class):
        model_class("a")
    assert vars(model_class).get("__init__") is own
    model_class("b")
    assert model_class.built == 2


def test_a_subclass_is_another_model():
    Model.built = Child.built = 0
    with built_once(Model):
        Model("a")
        Child("b")
        Child("c")
    assert (Model.built, Child.built) == (1, 2)


def test_an_error_is_raised_every_time():
    class Broken(Module):
        def __init__(self):
            raise ValueError("broken")

    with built_once(Broken):
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                Broken()
