import numpy as np
import pytest

from pop_export.ridge import Moments, fit, ridge_change
from pop_runtime.errors import ModelError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 7)) * np.array([1, 5, 0.1, 1, 1, 2, 1])
W = RNG.normal(size=(7, 3))
Y = X @ (W + RNG.normal(size=W.shape) * 0.3) + RNG.normal(size=(60, 3)) * 0.1 + 2.0


def moments(x, w, y):
    found = Moments(x.T @ x, y.shape[1])
    for rows in (slice(0, 25), slice(25, None)):  # in pieces, as batches arrive
        part = x[rows]
        found.add(part, y[rows] - part @ w, y[rows])
    return found


@pytest.mark.parametrize("has_intercept", [False, True])
@pytest.mark.parametrize("ridge", [1e-4, 1e-1])
def test_the_closed_form_equals_least_squares_with_one_more_row_per_feature(ridge, has_intercept):
    x = np.column_stack([X, np.ones(len(X))]) if has_intercept else X
    w = np.vstack([W, np.zeros(3)]) if has_intercept else W
    found = moments(x, w, Y)
    penalty = np.sqrt(ridge * (X**2).mean(0).mean() * len(X))
    rows = penalty * np.eye(x.shape[1])
    if has_intercept:
        rows[-1] = 0
    wanted, *_ = np.linalg.lstsq(np.vstack([x, rows]), np.vstack([Y - x @ w, np.zeros_like(rows[:, :3])]), rcond=None)
    assert np.allclose(ridge_change(found.gram, found.cross, ridge, has_intercept), wanted, atol=1e-9)


def test_the_error_from_the_sums_equals_the_error_on_the_tokens():
    found = moments(X, W, Y)
    change = RNG.normal(size=W.shape)
    spread = ((Y - Y.mean(0)) ** 2).sum()
    assert found.relative_error() == pytest.approx(((Y - X @ W) ** 2).sum() / spread)
    assert found.relative_error(change) == pytest.approx(((Y - X @ (W + change)) ** 2).sum() / spread)


def test_the_error_on_the_fitting_tokens_never_rises():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x, w, y = rng.normal(size=(9, 5)), rng.normal(size=(5, 2)), rng.normal(size=(9, 2))
        fitted = fit(moments_small(x, w, y), moments_small(x[::-1] * 2, w, y), has_intercept=False)
        assert fitted.error_after <= fitted.error_before


def moments_small(x, w, y):
    found = Moments(x.T @ x, y.shape[1])
    found.add(x, y - x @ w, y)
    return found


def test_a_fit_to_noise_does_not_help_on_other_tokens():
    rng = np.random.default_rng(1)
    x, noise = rng.normal(size=(8, 6)), rng.normal(size=(8, 2))
    other = rng.normal(size=(200, 6))
    w = rng.normal(size=(6, 2))
    fitted = fit(moments_small(x, w, x @ w + noise), moments_small(other, w, other @ w), has_intercept=False)
    assert fitted.error_after < fitted.error_before and not fitted.helps


def test_a_map_that_is_exact_already_is_left_alone():
    found = moments(X, W, X @ W)
    fitted = fit(found, found, has_intercept=False)
    assert not fitted.helps and np.abs(fitted.change).max() < 1e-9


def test_the_ridge_that_does_best_on_text_kept_aside_is_taken():
    rng = np.random.default_rng(2)
    x, other, w = rng.normal(size=(12, 10)), rng.normal(size=(300, 10)), np.zeros((10, 1))
    truth = rng.normal(size=(10, 1)) * 0.2
    held_out = moments_small(other, w, other @ truth)
    fitted = fit(moments_small(x, w, x @ truth + rng.normal(size=(12, 1))), held_out, has_intercept=False)
    assert fitted.ridge == 0.1 and fitted.held_out_after == held_out.relative_error(fitted.change)


def test_sums_that_are_not_finite_are_refused():
    with pytest.raises(ModelError, match=r"refit: expected finite sums .*--no-refit"):
        ridge_change(np.full((2, 2), np.inf), np.zeros((2, 1)), 1e-3, False)


@pytest.mark.parametrize("has_intercept", [False, True])
def test_without_any_token_to_fit_on_nothing_is_changed(has_intercept):
    """With --sink-tokens beyond every window of text an intercept made the sums singular: LinAlgError."""
    empty = Moments(np.zeros((4, 4)), 3)
    empty.add(np.zeros((0, 4)), np.zeros((0, 3)), np.zeros((0, 3)))
    for held_out in (empty, moments_small(RNG.normal(size=(5, 4)), np.zeros((4, 3)), RNG.normal(size=(5, 3)))):
        fitted = fit(empty, held_out, has_intercept)
        assert not fitted.helps and fitted.change.shape == (4, 3) and not fitted.change.any()
        assert fitted.held_out_after == held_out.relative_error()


def test_features_that_are_0_throughout_change_nothing():
    assert not ridge_change(np.zeros((3, 3)), np.zeros((3, 2)), 1e-4, False).any()
