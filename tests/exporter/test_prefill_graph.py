"""The prefill graph of a fitted plan: it computes what the plain twin computes, and decode stays what it was."""

import hashlib

import numpy as np
import onnx_ir as ir
import pytest
import torch

from pop_export.bundle import save_graphs
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.passes.narrow_projections import narrow_projections
from pop_export.graph.passes.use_prefill_weights import use_prefill_weights
from pop_export.reference import PrefillPlan
from pop_export.verify import NUM_STEPS, prompt_length, require_passed, verify
from pop_runtime.errors import GateError, ModelError
from pop_runtime.manifest import Manifest, Plan, Windows
from pop_runtime.sessions import open_pair
from tests.exporter.test_refit import CONFIGS, fitted
from tests.tiny_models import VOCAB_SIZE, tiny_model

SKIPPED = (1, 3, 4)
TRACED = [pytest.param("qk norm", marks=pytest.mark.slow), "bias", "one plus w norm", "fused", "fused conv1d with bias"]


class Traced:
    """One family's model, its decode graph, and a fitted plan; tracing takes ten seconds, so it is done once."""

    def __init__(self, family, folder):
        self.model, self.folder = tiny_model(CONFIGS[family]()), folder
        self.kv_layers = kv_layout(self.model)
        self.decode = build_decode_graph(self.model, self.kv_layers)
        self.plan = fitted(self.model, SKIPPED).plan

    def save(self, plan, name):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        graphs = {"prefill.onnx": cut_prefill_graph(self.decode, plan), "decode.onnx": self.decode.clone()}
        save_graphs(folder, graphs, "weights.bin")
        return folder

    def verify(self, graph_plan, twin_plan):
        manifest = Manifest(
            model={}, vocab_size=VOCAB_SIZE, max_positions=256, plan=Plan(len(self.kv_layers), SKIPPED, "user"),
            windows=Windows(), kv_dtype="float32", kv_layers=self.kv_layers, precision="fp32", eos_token_ids=(),
            bos_token_id=None, pad_token_id=None, tokenizer=None, chat_template=None, generation_config=None,
        )  # fmt: skip
        ids = np.random.default_rng(0).integers(0, 250, prompt_length(self.model) + NUM_STEPS).tolist()
        sessions = open_pair(self.save(graph_plan, "pair"), manifest, 1)
        return verify(sessions, manifest, self.model, twin_plan, ids)


@pytest.fixture(scope="module", params=TRACED)
def traced(request, tmp_path_factory):
    return Traced(request.param, tmp_path_factory.mktemp("graphs"))


def test_the_pair_with_refit_and_surrogates_equals_the_plain_twin(traced):
    assert traced.plan.weights and traced.plan.surrogates
    require_passed(traced.verify(traced.plan, traced.plan).checks)


def test_verification_sees_weights_that_reach_only_one_of_graph_and_twin(traced):
    with pytest.raises(GateError, match="pair, prompt whole"):
        require_passed(traced.verify(traced.plan, PrefillPlan(traced.plan.skipped_layers)).checks)


def initializer_hashes(path):
    graph = ir.load(path).graph
    return {
        name: hashlib.sha256(value.const_value.numpy().tobytes()).hexdigest()
        for name, value in graph.initializers.items()
        if value.const_value.dtype.is_floating_point()  # fusing leaves each graph shapes of its own
    }


def test_decode_is_bit_identical_with_and_without_refit(traced):
    with_refit = traced.save(traced.plan, "with")
    without = traced.save(PrefillPlan(traced.plan.skipped_layers), "without")
    assert initializer_hashes(with_refit / "decode.onnx") == initializer_hashes(without / "decode.onnx")
    shared = (
        initializer_hashes(with_refit / "prefill.onnx").items() & initializer_hashes(without / "decode.onnx").items()
    )
    own = [name for name in initializer_hashes(with_refit / "prefill.onnx") if name not in dict(shared)]
    assert own and all(".refit" in name or name.endswith((".surrogate", ".kv")) or "pop." in name for name in own)


def test_a_fused_projection_of_a_skipped_layer_loses_its_q_columns(traced):
    prefill = cut_prefill_graph(traced.decode, traced.plan)
    narrowed = {name: value.shape.numpy() for name, value in prefill.graph.initializers.items() if name.endswith(".kv")}
    if "qkv_proj" not in " ".join(traced.plan.weights):
        assert not narrowed or "c_attn" in " ".join(narrowed)
        return
    assert narrowed == {
        f"model.layers.{layer}.self_attn.qkv_proj.weight{refit}.kv": (64, 64)
        for layer, refit in ((1, ""), (3, ".refit"), (4, ".refit"))
    }


def linear_graph(weight, readers=1):
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=ir.Shape((2, 3, 4)))
    w = ir.val("a.weight", const_value=ir.tensor(np.asarray(weight, np.float32), name="a.weight"))
    nodes = [ir.node("MatMul", [x, w], name=f"m{index}") for index in range(readers)]
    outputs = [node.outputs[0] for node in nodes]
    for index, value in enumerate(outputs):
        value.name, value.dtype = f"y{index}", ir.DataType.FLOAT
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=[w], opset_imports={"": 24})
    return ir.Model(graph, ir_version=10)


def test_a_new_weight_takes_the_place_of_the_old_one():
    model = linear_graph(np.ones((4, 5)))
    assert use_prefill_weights(model, {"a.weight": torch.full((4, 5), 2.0)}) == 1
    assert set(model.graph.initializers) == {"a.weight.refit"}


@pytest.mark.parametrize(
    ("model", "weights", "found"),
    [
        (linear_graph(np.ones((4, 5))), {"b.weight": torch.ones(4, 5)}, "found none"),
        (linear_graph(np.ones((4, 5)), readers=2), {"a.weight": torch.ones(4, 5)}, "found MatMul, MatMul"),
        (linear_graph(np.ones((4, 5))), {"a.weight": torch.ones(4, 5), "a.bias": torch.ones(5)}, "expected a bias"),
    ],
)
def test_a_weight_that_the_graph_does_not_read_as_expected_is_refused(model, weights, found):
    with pytest.raises(ModelError, match=found):
        use_prefill_weights(model, weights)


def sliced_graph(spans, bias=False):
    model = linear_graph(np.arange(4 * 6).reshape(4, 6))
    graph = model.graph
    product = graph[0].outputs[0]
    if bias:
        b = ir.val("a.bias", const_value=ir.tensor(np.arange(6, dtype=np.float32), name="a.bias"))
        graph.register_initializer(b)
        add = ir.node("Add", [product, b])
        graph.append(add)
        product = add.outputs[0]
    graph.outputs.clear()
    for start, stop in spans:
        bounds = {"start": start, "stop": stop, "axis": 2}
        ends = [
            ir.val(f"{name}{start}", const_value=ir.tensor(np.array([at], np.int64), name=f"{name}{start}"))
            for name, at in bounds.items()
        ]
        for value in ends:
            graph.register_initializer(value)
        node = ir.node("Slice", [product, *ends])
        graph.append(node)
        node.outputs[0].name, node.outputs[0].dtype = f"s{start}", ir.DataType.FLOAT
        graph.outputs.append(node.outputs[0])
    return model


def run(model, tmp_path):
    import onnxruntime

    ir.save(model, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("spans", "narrowed"), [([(2, 4), (4, 6)], 1), ([(1, 3)], 1), ([(0, 2), (4, 6)], 0)])
def test_narrowing_keeps_what_the_slices_read(spans, narrowed, bias, tmp_path):
    before = run(sliced_graph(spans, bias), tmp_path)
    model = sliced_graph(spans, bias)
    assert narrow_projections(model) == narrowed
    if narrowed:
        low, high = min(a for a, _ in spans), max(b for _, b in spans)
        assert model.graph.initializers["a.weight.kv"].const_value.shape.numpy() == (4, high - low)
    assert all(np.array_equal(a, b) for a, b in zip(before, run(model, tmp_path), strict=True))


def test_products_that_share_a_bias_are_narrowed_each_with_its_own(tmp_path):
    # equal biases are one constant of the graph: the second product's cut bias had the name of the first's
    model = sliced_graph([(2, 4)], bias=True)
    x, bias = model.graph.inputs[0], model.graph.initializers["a.bias"]
    weight = ir.val("b.weight", const_value=ir.tensor(np.ones((4, 6), np.float32), name="b.weight"))
    model.graph.register_initializer(weight)
    product = ir.node("MatMul", [x, weight])
    add = ir.node("Add", [product.outputs[0], bias])
    bounds = [model.graph.initializers[name] for name in ("start2", "axis2")]
    stop = ir.val("stop5", const_value=ir.tensor(np.array([5], np.int64), name="stop5"))
    model.graph.register_initializer(stop)
    part = ir.node("Slice", [add.outputs[0], bounds[0], stop, bounds[1]])
    model.graph.extend([product, add, part])
    part.outputs[0].name, part.outputs[0].dtype = "other", ir.DataType.FLOAT
    model.graph.outputs.append(part.outputs[0])
    before = run(model, tmp_path)
    assert narrow_projections(model) == 2
    assert all(np.array_equal(a, b) for a, b in zip(before, run(model, tmp_path), strict=True))


def test_nothing_is_narrowed_where_all_columns_are_read():
    assert narrow_projections(linear_graph(np.ones((4, 5)))) == 0
