# SPDX-License-Identifier: Apache-2.0
"""What differs between Keras 3, tf_keras (new and legacy optimizers) and tf.compat.v1.train, in one place.

An object is recognised by the modules that its classes come from. A Keras is imported where something of it is made or
loaded, not with this module.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from sparse_operation_kit.tensorflow.table_variable import TableVariable

KERAS = "keras"
TF_KERAS = "tf_keras"
LEGACY = "keras_legacy"
TF1 = "tf1"

# Modules of the optimizers of each family, by prefix; the first that fits counts.
_FAMILIES = (
    ("keras.src.optimizers", KERAS),
    ("keras.src.backend", KERAS),
    ("tf_keras.src.optimizers.legacy", LEGACY),
    ("tf_keras.src.optimizers", TF_KERAS),
    ("tensorflow.python.training", TF1),
)

# Classes that wrap another optimizer's class without changing what a step does to a variable.
_WRAPPERS = ("horovod.", "sparse_operation_kit.")


def family(optimizer: Any) -> str | None:
    """KERAS, TF_KERAS, LEGACY or TF1 by the base classes of an optimizer; None when it is none of them, or of this
    package.
    """
    return _family(type(optimizer))


def _family(of: type) -> str | None:
    if hasattr(of, "_sok_plain"):
        return None
    for cls in of.__mro__:
        for prefix, name in _FAMILIES:
            if cls.__module__.startswith(prefix) and "ptimizer" in "".join(base.__name__ for base in cls.__mro__):
                return name
    return None


def library_class(optimizer: Any) -> str | None:
    """The name of the framework's own class that an optimizer is an instance of; None for a user's subclass.

    A user's subclass may take another step than its base; wrappers for distributed training do not.
    """
    for cls in type(optimizer).__mro__:
        if getattr(cls, "_sok_wrapper", False) or cls.__module__.startswith(_WRAPPERS):
            continue
        return cls.__name__ if any(cls.__module__.startswith(prefix) for prefix, _ in _FAMILIES) else None
    return None


def kind(optimizer: Any) -> str | None:
    """KERAS or TF_KERAS: which Keras an optimizer comes with, one of this package too; None where with none."""
    return kind_of_class(type(optimizer))


def kind_of_class(cls: type) -> str | None:
    """The same of an optimizer's class."""
    own: str | None = getattr(cls, "_sok_keras", None)
    return own or {KERAS: KERAS, TF_KERAS: TF_KERAS, LEGACY: TF_KERAS}.get(_family(cls) or "")


def prefers_tf_keras() -> bool:
    """Whether `tf.keras` is tf_keras. TensorFlow reads the same variable; to ask `tf.keras` would import a Keras."""
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "True", "true")


def active() -> str | None:
    """KERAS or TF_KERAS: what `tf.keras` is; None where that is not loaded."""
    name = TF_KERAS if prefers_tf_keras() else KERAS
    return name if name in loaded() else None


def library(kind: str) -> Any:
    """The module `keras` or `tf_keras` that optimizers of a family come with."""
    return importlib.import_module("keras" if kind == KERAS else "tf_keras")


def loaded() -> dict[str, Any]:
    """KERAS and TF_KERAS -> the module, of those that this process has loaded."""
    return {kind: sys.modules[kind] for kind in (KERAS, TF_KERAS) if f"{kind}.src.optimizers" in sys.modules}


def register(kind: str, name: str, cls: type) -> None:
    """Lets Keras find a class of this package by its name when it loads a file."""
    library(kind).saving.register_keras_serializable("sparse_operation_kit", name)(cls)


def class_config(kind: str, cls: type) -> dict[str, Any]:
    """How Keras names the class of an optimizer in its files, as part of a config."""
    nameless: Any = object.__new__(cls)
    vars(nameless)["get_config"] = dict  # all that is asked of it
    config = library(kind).saving.serialize_keras_object(nameless)
    return {name: config[name] for name in ("module", "class_name", "registered_name")}


def deserialize(kind: str, config: dict[str, Any], custom_objects: Any = None) -> Any:
    """The object that Keras makes of its class and config."""
    return library(kind).saving.deserialize_keras_object(config, custom_objects=custom_objects)


def replace(module: str, name: str, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts make(method) in the place of a method of a class, once, where the class's module was imported."""
    owner = getattr(sys.modules.get(module), name, None)
    if owner is None or hasattr(vars(owner)[method], "_sok_replaces"):
        return
    inherited = vars(owner)[method]
    replaced = functools.wraps(inherited)(make(inherited))
    replaced._sok_replaces = inherited  # type: ignore[attr-defined]
    setattr(owner, method, replaced)


def as_config(kind: str, value: Any) -> Any:
    """A setting as plain data: the number that a variable or tensor holds; a schedule or function as Keras has it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tf.Variable, tf.Tensor)) or hasattr(value, "_value"):
        return float(raw(value))
    return library(kind).saving.serialize_keras_object(value)


def from_config(kind: str, value: Any, custom_objects: Any = None) -> Any:
    """What `as_config` was given."""
    return deserialize(kind, value, custom_objects) if isinstance(value, dict) else value


def variables(optimizer: Any) -> list[Any]:
    """The variables of an optimizer of any Keras or of this package."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


def is_built(optimizer: Any) -> bool:
    """Whether an optimizer of Keras 3 or tf_keras has been built for variables."""
    return bool(getattr(optimizer, "built" if family(optimizer) == KERAS else "_built", False))


def raw(variable: Any) -> Any:
    """The tf.Variable that a Keras 3 variable wraps, or the variable itself."""
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def iterations(optimizer: Any) -> Any:
    """The variable that counts the optimizer's steps, or None (tf.compat.v1.train)."""
    counter = getattr(optimizer, "_iterations", None) if family(optimizer) in (KERAS, LEGACY) else None
    if counter is None:
        with tf.init_scope():  # legacy ones make it when they are first asked, maybe while a function is traced
            counter = getattr(optimizer, "iterations", None)
    return counter


def is_schedule(rate: Any) -> bool:
    """Whether a learning rate is a LearningRateSchedule of any Keras."""
    return any(cls.__name__ == "LearningRateSchedule" for cls in type(rate).__mro__)


def takes_global_step(optimizer: Any) -> bool:
    """Whether apply_gradients counts in a variable that it is given (tf.compat.v1.train, and this package's own)."""
    return family(optimizer) == TF1 or hasattr(optimizer, "sok_step")


def schedule(optimizer: Any) -> Any:
    """The schedule of an optimizer of Keras 3 or tf_keras, a function of the step count; None without one."""
    rate = getattr(optimizer, "_learning_rate", None)
    if family(optimizer) == KERAS:
        return rate if is_schedule(rate) else None
    is_variable = isinstance(rate, (tf.Variable, tf.Tensor))
    return rate if callable(rate) and not is_variable else None


def compute_rate(optimizer: Any) -> None:
    """Lets an optimizer of tf_keras say the rate that its schedule has now, as its step of dense variables does."""
    found = schedule(optimizer) if family(optimizer) == TF_KERAS else None
    if is_schedule(found):
        if not hasattr(optimizer, "_current_learning_rate"):
            optimizer._build_learning_rate(found)  # the schedule was set after the optimizer was made
        optimizer._compute_current_learning_rate()


def is_librarys_own(value: Any) -> bool:
    """Whether a class comes with Keras 3 or tf_keras; a user's may ask more of its arguments than these do."""
    return type(value).__module__.startswith(("keras.src.", "tf_keras.src."))


def _places_name(optimizer: Any) -> str:
    """Of the attribute of an optimizer of Keras 3 or tf_keras: a variable's key -> its place in lists of states."""
    return "_trainable_variables_indices" if family(optimizer) == KERAS else "_index_dict"


def _places(optimizer: Any) -> dict[Any, int]:
    places: dict[Any, int] = getattr(optimizer, _places_name(optimizer))
    return places


def set_places(optimizer: Any, variables: Sequence[Any]) -> None:
    """Lets an optimizer know these variables alone, whose states are in its lists in this order."""
    places = {optimizer._var_key(variable): place for place, variable in enumerate(variables)}
    object.__setattr__(optimizer, _places_name(optimizer), places)


def step_rows(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], iterations: Any) -> None:
    """One step of these variables, which it knows, as the step after `iterations`, a variable that stays as it is."""
    if family(optimizer) == KERAS:
        object.__setattr__(optimizer, "_iterations", iterations)
        # Where it sees that an array has no rows, eagerly, Keras 3 takes it for a bias, and fails.
        with_rows = [place for place, gradient in enumerate(gradients) if gradient.shape[0] != 0]
        gradients, variables = ([each[place] for place in with_rows] for each in (gradients, variables))
    else:
        optimizer._iterations.assign(iterations)
        compute_rate(optimizer)
        if hasattr(optimizer, "_u_product_counter"):  # of Nadam, in Python
            optimizer._u_product_counter = int(iterations.numpy()) + 1
    gradients = optimizer._clip_gradients(gradients)
    optimizer._apply_weight_decay(variables)
    if family(optimizer) == KERAS:
        optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)
    else:
        optimizer._internal_apply_gradients(list(zip(gradients, variables, strict=True)))


# Attributes of optimizers of Keras 3 and tf_keras: lists with a state for each variable, by their names in dumps.
_STATES = {
    "Adadelta": {"accum_grad": "_accumulated_grads", "accum_var": "_accumulated_delta_vars"},
    "Adagrad": {"accumulator": "_accumulators"},
    "Adam": {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"},
    "AdamW": {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"},
    "Adamax": {"m": "_m", "v": "_u"},
    "Ftrl": {"accumulator": "_accumulators", "linear": "_linears"},
    "RMSprop": {"rms": "_velocities", "mg": "_average_gradients", "momentum": "_momentums"},
    "SGD": {"momentum": "momentums"},
}


def state_names(optimizer: Any) -> dict[str, str]:
    """The attributes of an optimizer that has a fused form -> the names in dumps of the states that they hold."""
    return {attribute: name for name, attribute in _STATES.get(library_class(optimizer) or "", {}).items()}


def dense_state(optimizer: Any, variable: Any, name: str) -> Any:
    """The tf.Variable of a state of a dense variable for which an optimizer was built, by its name in dumps.

    Raises NotImplementedError for an optimizer whose states are not known.
    """
    attribute = _STATES.get(library_class(optimizer) or "", {}).get(name)
    if attribute is None or family(optimizer) not in (KERAS, TF_KERAS):
        raise NotImplementedError(
            f"the state '{name}' that {type(optimizer).__name__} keeps for replicated tables cannot be dumped or loaded"
        )
    return raw(getattr(optimizer, attribute)[_places(optimizer)[optimizer._var_key(variable)]])


def build(optimizer: Any, variables: Sequence[Any], make_legacy: bool = False) -> None:
    """Makes sure that an optimizer has states for these dense variables; make_legacy: tf_keras's legacy ones too, which
    otherwise make them as they go.

    Keras's optimizers accept only the variables that they were first given. Here later ones are added: an optimizer is
    built for them alone and its lists of states are joined with those it had.
    """
    kind = family(optimizer)
    if kind == LEGACY and make_legacy and variables:
        with tf.init_scope():
            optimizer._create_all_weights(list(variables))
    if kind not in (KERAS, TF_KERAS) or not variables:
        return
    built_name = "built" if kind == KERAS else "_built"
    with tf.init_scope():
        if not is_built(optimizer):
            optimizer.build(list(variables))
            return
        indices = dict(_places(optimizer))
        new = [variable for variable in variables if optimizer._var_key(variable) not in indices]
        if not new:
            return
        before = {
            name: list(value) for name, value in vars(optimizer).items() if _is_state_list(name, value, len(indices))
        }
        object.__setattr__(optimizer, built_name, False)
        optimizer.build(new)
        object.__setattr__(optimizer, built_name, True)
        for name, old in before.items():
            added = getattr(optimizer, name)
            if len(added) == len(new):
                object.__setattr__(optimizer, name, old + list(added))
        joined = dict(indices)
        for offset, variable in enumerate(new):
            joined[optimizer._var_key(variable)] = len(indices) + offset
        object.__setattr__(optimizer, _places_name(optimizer), joined)


def _is_state_list(name: str, value: Any, count: int) -> bool:
    return name not in ("_variables",) and isinstance(value, (list, tuple)) and len(value) == count and count > 0


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Whether the optimizer's weight decay applies to a variable (see Keras's exclude_from_weight_decay)."""
    ask = None if family(optimizer) is None else getattr(optimizer, "_use_weight_decay", None)
    return True if ask is None else bool(ask(variable))


@functools.cache
def _table_variable_class() -> Any:
    import keras

    class KerasTable(keras.Variable):
        """A Keras 3 variable around a table, so that layers and optimizers of Keras 3 know it."""

        def __init__(self, table: TableVariable) -> None:
            self._sok_table = table
            super().__init__(
                lambda *_, **__: None,  # not called: see below
                shape=tuple(size or 0 for size in table.shape.as_list()),  # Keras wants numbers; a table's may grow
                dtype=table.dtype.name,
                trainable=table.trainable,
                autocast=False,
                name=table.table_name.replace("/", "_"),
            )
            self.constraint = table.constraint

        def _initialize_with_initializer(self, initializer: Any) -> None:
            self._value = self._sok_table

    return KerasTable


def keras_variable(table: TableVariable) -> Any:
    """The Keras 3 variable that wraps a table: one, as long as anybody has it."""
    known = _wrapped(table)
    if known is None:
        known = _table_variable_class()(table)
        table._sok_keras_variable = weakref.ref(known)
    return known


def _wrapped(table: TableVariable) -> Any:
    reference = getattr(table, "_sok_keras_variable", None)
    return None if reference is None else reference()


def warn_in_layers(tables: Iterable[TableVariable]) -> None:
    """Warns of each table with rows here that a layer of Keras 3 is looking up in now, and that is a weight of none."""
    state = sys.modules.get("keras.src.backend.common.global_state")
    if state is None or state.get_global_attribute("current_call_ctx") is None:
        return
    for table in tables:
        if table.trainable and table.placement.may_hold_rows and _wrapped(table) is None:
            warn_of_untracked(table, "is looked up in a layer: make it an attribute of one, in __init__ or build")


def warn_of_untracked(table: TableVariable, what: str) -> None:
    """Warns, once of a table, that Keras does not train it."""
    if not getattr(table, "_sok_warned", False):
        table._sok_warned = True
        message = f"table '{table.table_name}' is not a weight of any layer of Keras, and `fit` does not train it: it"
        warnings.warn(f"{message} {what}", UserWarning, stacklevel=4)


def track(layer: Any, table: TableVariable) -> Any:
    """Makes a Keras layer (of either Keras) list a table among its variables. Returns what it lists."""
    if not is_keras3_layer(layer):
        return table  # tf_keras finds tf.Variables by itself, among the layer's attributes
    layer._tracker.track(table)  # see keras_tables; it may have been found among the attributes before
    variable = keras_variable(table)
    if not layer.trainable:
        variable.trainable = False  # as of a weight: models look at their variables, not at the layers that have them
    return variable


def is_keras3_layer(layer: Any) -> bool:
    """Whether a layer's class is of Keras 3."""
    return any(cls.__module__.startswith("keras.src.layers") for cls in type(layer).__mro__)


def take_any_input(layer: Any) -> None:
    """Lets a layer be called with ragged and sparse tensors, arrays and lists; Keras 3 would make tensors of them."""
    if is_keras3_layer(layer):
        layer._convert_input_args = False
        layer._allow_non_tensor_positional_args = True


def add_weight(layer: Any, name: str, shape: Sequence[int], initializer: Any, **options: Any) -> Any:
    """A weight of a layer that autocast leaves alone; options: dtype, trainable, regularizer, constraint."""
    no_cast = {"autocast": False} if is_keras3_layer(layer) else {"experimental_autocast": False}
    return layer.add_weight(name=name, shape=tuple(shape), initializer=initializer, **no_cast, **options)


def policy_name(dtype: Any) -> Any:
    """The name of a dtype policy as configs of either Keras have it."""
    if isinstance(dtype, dict):
        return dtype["config"]["name"]
    return getattr(dtype, "name", dtype)


def variable_dtype(policy: Any) -> str:
    """The dtype of the variables of layers that have this policy, or its name; None is the default."""
    name = policy_name(policy)
    return "float32" if name is None or str(name).startswith("mixed_") else str(name)


def replicated_states(optimizer: Any, local: Sequence[Any]) -> list[Any]:
    """What variables an optimizer has but the states of those that are among `local`."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Keras's LossScaleOptimizers
    keys = {id(raw(variable)) for variable in local}
    excluded: set[int] = set()
    if family(optimizer) == LEGACY:
        names = {_legacy_key(raw(variable)) for variable in local}
        excluded = {id(state) for key, slots in optimizer._slots.items() if key in names for state in slots.values()}
        return [variable for variable in optimizer.variables() if id(variable) not in excluded]
    if family(optimizer) == KERAS:
        positions = [id(raw(variable)) in keys for variable in optimizer._trainable_variables or []]
    else:
        own = {optimizer._var_key(raw(variable)) for variable in local}
        positions = [key in own for key in getattr(optimizer, "_index_dict", {})]
    for name, value in vars(optimizer).items():
        if _is_state_list(name, value, len(positions)) and name != "_trainable_variables":
            excluded |= {id(state) for state, is_local in zip(value, positions, strict=True) if is_local}
    return [variable for variable in optimizer.variables if id(variable) not in excluded]


def _legacy_key(variable: Any) -> str:
    from tf_keras.src.optimizers.legacy import optimizer_v2

    return str(optimizer_v2._var_key(variable))
