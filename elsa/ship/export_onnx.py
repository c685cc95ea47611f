"""A traced graph as an ONNX file: threshold with a default, facts in the metadata, numbers no wider than needed."""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram

from elsa.errors import UserError
from elsa.ship.export_graph import OUTPUTS

Run = Callable[[NDArray], tuple[NDArray, ...]]
LONG = 1024  # numbers in a constant from which it is worth storing in float32
QUANTISE_AT_ONCE = 16  # images; all activations of a batch are kept for their ranges


def require_onnx() -> None:
    """Refuse before the work where the extra is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"export to ONNX needs {error.name}, which is not installed: pip install elsa[onnx]") from error


def to_onnx(program: ExportedProgram, input_name: str, threshold: float) -> Any:
    """The ONNX model of a traced Graph."""
    from onnx import numpy_helper

    with quiet():
        exported = torch.onnx.export(
            program, dynamo=True, input_names=[input_name, "threshold"], output_names=list(OUTPUTS), verbose=False
        )
    assert exported is not None
    model = exported.model_proto
    # an initializer with the name of an input is its default
    model.graph.initializer.append(numpy_helper.from_array(np.array(threshold, np.float64), "threshold"))
    _narrow_constants(model)
    _name_dimensions(model)
    return model


def described(model: Any, about: dict[str, str]) -> bytes:
    """The file's bytes with what must be known about it in its metadata."""
    import onnx

    onnx.helper.set_model_props(model, about)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def runner(payload: bytes) -> Run:
    """Scores, p-values and verdicts by ONNX Runtime, with the default threshold."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it comments on initializers that nothing needs after folding
    session = onnxruntime.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: tuple(session.run(list(OUTPUTS), {name: images}))


def quantised(model: Any, images: NDArray) -> Any:
    """The model with 8-bit convolutions, whose ranges are those seen on the images."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    name = model.graph.input[0].name

    class Batches(CalibrationDataReader):
        def __init__(self) -> None:
            self.starts = iter(range(0, len(images), QUANTISE_AT_ONCE))

        def get_next(self) -> dict[str, NDArray] | None:
            start = next(self.starts, None)
            return None if start is None else {name: images[start : start + QUANTISE_AT_ONCE]}

    places = [place for place, node in enumerate(model.graph.node) if node.op_type == "Conv"]
    network = [node.name for node in model.graph.node[places[0] : places[-1] + 2]] if places else []
    if not network:
        raise UserError("--precision int8 quantises convolutions, and this model has none; use fp32")
    with tempfile.TemporaryDirectory(prefix="elsa-") as folder, quiet():
        small = Path(folder) / "small.onnx"
        quantize_static(
            model,
            small,
            Batches(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "Clip", "Relu", "Add"],
            nodes_to_quantize=network,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(small)


def replace_constant(model: Any, name: str, value: NDArray) -> None:
    """Another value for an initializer."""
    from onnx import numpy_helper

    [constant] = [constant for constant in model.graph.initializer if constant.name == name]
    constant.CopyFrom(numpy_helper.from_array(value, name))


def _name_dimensions(model: Any) -> None:
    """Call the dimensions that may vary by their names instead of the tracer's."""
    dimensions = model.graph.input[0].type.tensor_type.shape.dim
    names = {
        dimension.dim_param: name
        for dimension, name in zip(dimensions, ("batch", "channels", "height", "width"), strict=False)
        if dimension.dim_param
    }
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in names:
                dimension.dim_param = names[dimension.dim_param]


def _narrow_constants(model: Any) -> None:
    """Store float64 constants that are float32 numbers as such, and widen them in the graph: half the file."""
    from onnx import TensorProto, helper, numpy_helper

    widened = []
    for constant in model.graph.initializer:
        if constant.data_type != TensorProto.DOUBLE or np.prod(constant.dims) < LONG:
            continue
        wide = numpy_helper.to_array(constant)
        narrow = wide.astype(np.float32)
        if (narrow == wide).all():
            name = constant.name
            constant.CopyFrom(numpy_helper.from_array(narrow, f"{name}.narrow"))
            widened.append(helper.make_node("Cast", [constant.name], [name], to=TensorProto.DOUBLE))
    nodes = [*widened, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch's exporter and ONNX Runtime's quantiser say of themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
