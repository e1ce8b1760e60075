"""Virtual gates against finite differences, and everything a score must not depend on."""

import numpy as np
import pytest
import torch
import transformers

from pop_export.calibration.calibrate import calibrate
from pop_export.calibration.corpus import Samples
from pop_export.calibration.gates import boundary_of, draw, gate_gradients, gate_importance
from pop_export.decoder import replaced_outputs
from pop_runtime.errors import ModelError
from tests.tiny_models import NUM_LAYERS, TINY, VOCAB_SIZE, tiny_model

# float32: rounding of a pass over a few dozen positions. A wrong boundary, mask or target is off by 0.1 and more.
SAME = dict(rtol=1e-3, atol=1e-4)
# float64 gradients against central differences with a step of 1e-5: error ~ step^2 and 1e-16 / step
DIFFERENCES = dict(rtol=1e-6, atol=1e-6)
STEP = 1e-5


@pytest.fixture
def float64(monkeypatch):
    """Let a model of doubles stay one: norms and softmax cast to float32, whose rounding drowns small differences."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def samples_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length) for length in lengths]


def gpt2():
    config = transformers.GPT2Config(
        n_embd=64, n_layer=NUM_LAYERS, n_head=4, vocab_size=VOCAB_SIZE, n_positions=256, bos_token_id=256,
        eos_token_id=257,
    )  # fmt: skip
    return tiny_model(config)


def gemma3():
    config = transformers.Gemma3TextConfig(**TINY, head_dim=16, sliding_window=8, query_pre_attn_scalar=16)
    return tiny_model(config, norm_offset=0.0)


FAMILIES = {"llama": tiny_model, "gpt2": gpt2, "gemma3": gemma3}


def slow_loss(model, sample, gates, targets):
    """The loss of one unpadded sample under given gates [2, L], spelled out."""
    boundary = boundary_of(len(sample))

    def gated(layer, entered, left):
        gate = torch.full((len(sample), 1), float(gates[0, layer]), dtype=torch.float64)
        gate[boundary:] = float(gates[1, layer])
        return entered + gate * (left - entered)

    with torch.no_grad(), replaced_outputs(model, gated):
        log_probabilities = model(torch.from_numpy(sample)[None], use_cache=False).logits[0].log_softmax(-1)
    return -sum(
        log_probabilities[position, target]
        for position, target in zip(range(boundary, len(sample) - 1), targets, strict=True)
    ).item()


def slow_gradients(model, sample, targets):
    """Central differences of `slow_loss` in each gate, [2, L]."""
    grads = np.empty((2, NUM_LAYERS))
    for index in np.ndindex(grads.shape):
        gates = np.ones(grads.shape)
        gates[index] += STEP
        above = slow_loss(model, sample, gates, targets)
        gates[index] -= 2 * STEP
        grads[index] = (above - slow_loss(model, sample, gates, targets)) / (2 * STEP)
    return grads


@pytest.mark.parametrize("family", FAMILIES)
def test_gate_gradients_equal_finite_differences_of_the_loss(family, float64):
    model = FAMILIES[family]().double()
    samples = samples_of(17, 6)
    found = gate_gradients(model, samples, fisher="empirical", batch_size=2)
    for row, sample in enumerate(samples):
        expected = slow_gradients(model, sample, sample[boundary_of(len(sample)) + 1 :])
        np.testing.assert_allclose(found.prefill[row], expected[0], **DIFFERENCES)
        np.testing.assert_allclose(found.decode[row], expected[1], **DIFFERENCES)
        assert np.abs(expected[0, :-1]).min() > 1e-3, "a prefill gate without effect would prove nothing"


def test_sampled_targets_come_from_the_seed_and_the_samples_index_alone(float64):
    model = tiny_model().double()
    samples = samples_of(24, 17)
    found = gate_gradients(model, samples, fisher="sampled", seed=3, batch_size=2)
    for row, sample in enumerate(samples):
        boundary = boundary_of(len(sample))
        with torch.no_grad():
            logits = model(torch.from_numpy(sample)[None]).logits[0, boundary:-1]
        targets = draw(logits.softmax(-1), np.random.default_rng([3, row]))
        expected = slow_gradients(model, sample, targets)
        np.testing.assert_allclose(found.prefill[row], expected[0], **DIFFERENCES)
        np.testing.assert_allclose(found.decode[row], expected[1], **DIFFERENCES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layers_prefill_gate_has_no_effect_at_all(family):
    found = gate_gradients(FAMILIES[family](), samples_of(20, 20, 13), batch_size=2)
    assert (found.prefill[:, -1] == 0).all()
    assert (np.abs(found.decode[:, -1]) > 0).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
def test_gradients_are_the_same_for_any_batch_size_and_padding(family, fisher):
    model = FAMILIES[family]()
    samples = samples_of(31, 8, 31, 4, 19)
    alone = gate_gradients(model, samples, fisher=fisher, batch_size=1)
    for batch_size in (2, 3, 8):
        together = gate_gradients(model, samples, fisher=fisher, batch_size=batch_size)
        np.testing.assert_allclose(together.prefill, alone.prefill, **SAME)
        np.testing.assert_allclose(together.decode, alone.decode, **SAME)


def test_one_seed_gives_one_result_and_another_seed_another():
    model, samples = tiny_model(), samples_of(24, 24)
    first, again, other = (gate_gradients(model, samples, seed=seed).decode for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_sampled_and_empirical_targets_give_different_gradients():
    model, samples = tiny_model(), samples_of(24, 24)
    sampled, empirical = (gate_gradients(model, samples, fisher=fisher).decode for fisher in ("sampled", "empirical"))
    assert np.abs(sampled - empirical).max() > 0.1


def test_draws_follow_the_probabilities():
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0]).expand(20_000, 4)
    counts = torch.bincount(draw(probabilities, np.random.default_rng(0)), minlength=4) / 20_000
    # five standard deviations of a share of 0.5 among 20,000
    torch.testing.assert_close(counts, probabilities[0], atol=0.018, rtol=0)
    assert counts[3] == 0


def test_draws_move_about_as_rarely_as_logits_change():
    # Regression: inverting the cumulative sum moved one draw in a thousand for a change of 1e-5 in 50,000 logits,
    # and one moved draw changed a sample's gradient by a tenth.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 50_000, generator=generator) * 2
    moved = logits + 1e-5 * torch.randn(logits.shape, generator=generator)
    first, second = (draw(scores.softmax(-1), np.random.default_rng(0)) for scores in (logits, moved))
    assert (first == second).all()


def test_the_model_is_as_before_afterwards():
    model = tiny_model().train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.lm_head.weight.requires_grad_(False)
    gate_gradients(model, samples_of(8))
    assert model.training
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == [
        "model.embed_tokens.weight"  # tied to the head
    ]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_progress_counts_every_sample_once():
    counts = []
    gate_gradients(tiny_model(), samples_of(8, 8, 8), batch_size=2, advance=counts.append)
    assert counts == [2, 1]


def test_importance_is_the_mean_square_with_its_standard_error():
    importance, standard_error = gate_importance(np.array([[1.0, 0.0], [-3.0, 0.0]]))
    np.testing.assert_allclose(importance, [5.0, 0.0])
    np.testing.assert_allclose(standard_error, [4.0, 0.0])  # squares 1 and 9: std 5.66, / sqrt(2)


def test_the_standard_error_of_one_sample_is_unknown():
    importance, standard_error = gate_importance(np.array([[2.0, 1.0]]))
    np.testing.assert_array_equal(importance, [4.0, 1.0])
    assert np.isnan(standard_error).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_names_its_sample_and_layer(value):
    grads = np.ones((3, 4))
    grads[1, 2] = value
    with pytest.raises(ModelError, match=r"calibration sample 1, layer 2: expected a finite gate gradient, found"):
        gate_importance(grads)


def test_a_model_with_a_damaged_weight_is_refused():
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] = torch.nan
    samples = Samples(ids=tuple(samples_of(8)), held_out=(), description="random", sha256="0")
    with pytest.raises(ModelError, match="calibration sample 0, layer"):
        calibrate(model, samples, model_name="tiny", model_sha256="0", length=8, fisher="sampled", seed=0, batch_size=1)


def test_calibration_holds_both_stages_scores_and_how_they_were_measured():
    model, ids = tiny_model(), tuple(samples_of(16, 16, 9))
    samples = Samples(ids=ids, held_out=(), description="random bytes", sha256="ab")
    found = calibrate(
        model, samples, model_name="tiny", model_sha256="cd", length=16, fisher="empirical", seed=5, batch_size=2
    )
    importance, standard_error = gate_importance(gate_gradients(model, ids, fisher="empirical", batch_size=2).prefill)
    assert found.prefill.importance == tuple(importance)
    assert found.prefill.standard_error == tuple(standard_error)
    assert found.prefill.importance[-1] == 0 < found.decode.importance[-1]
    assert (found.num_layers, found.num_samples, found.length_tokens) == (NUM_LAYERS, 3, 16)
    assert (found.fisher, found.seed, found.corpus, found.corpus_sha256) == ("empirical", 5, "random bytes", "ab")
    assert (found.model_name, found.model_sha256) == ("tiny", "cd")
    assert found.tools["torch"] == torch.__version__


def test_a_model_that_cannot_limit_its_logits_gives_the_same_gradients():
    model = tiny_model()
    samples = samples_of(12, 7)
    expected = gate_gradients(model, samples)
    forward = model.forward
    model.forward = lambda input_ids, attention_mask, use_cache: forward(
        input_ids, attention_mask=attention_mask, use_cache=use_cache
    )
    found = gate_gradients(model, samples)
    np.testing.assert_allclose(found.prefill, expected.prefill, **SAME)
    np.testing.assert_allclose(found.decode, expected.decode, **SAME)
