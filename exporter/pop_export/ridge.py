"""Closed-form ridge regression towards a given map, from sums that can be added up piece by piece. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pop_runtime.errors import ModelError

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)  # tried in turn where text is kept aside to judge by


class Moments:
    """Sums over tokens, in float64, that say all a linear fit needs to know of them.

    Attributes:
        num_tokens: N.
        gram: [F, F], X^T X of the features.
        cross: [F, R], X^T E of the features with what the original map leaves over, E = Y - X W.
        residual: sum of E^2.
        spread: sum of (Y - mean(Y))^2: what relative errors are relative to.
    """

    def __init__(self, gram: np.ndarray, num_targets: int) -> None:
        """Start with no target added.

        Args:
            gram: [F, F] float64, X^T X over all tokens; given, because several maps share their features.
            num_targets: R.
        """
        self.num_tokens = 0
        self.gram = gram
        self.cross = np.zeros((len(gram), num_targets))
        self.residual = 0.0
        self._sum, self._squares = np.zeros(num_targets), 0.0

    def add(self, features: np.ndarray, residuals: np.ndarray, targets: np.ndarray) -> None:
        """Add tokens.

        Args:
            features: [N, F] float64.
            residuals: [N, R] float64, Y - X W.
            targets: [N, R] float64, Y.
        """
        self.num_tokens += len(features)
        self.cross += features.T @ residuals
        self.residual += float((residuals**2).sum())
        self._sum += targets.sum(0)
        self._squares += float((targets**2).sum())

    @property
    def spread(self) -> float:
        """Return the sum of squares of the targets around their mean."""
        return self._squares - float((self._sum**2).sum()) / max(self.num_tokens, 1)

    def relative_error(self, change: np.ndarray | None = None) -> float:
        """Return the squared error of the map W + change on these tokens, over the spread of the targets.

        Args:
            change: [F, R]; None: of W itself.
        """
        error = self.residual
        if change is not None:
            error += float((change * (self.gram @ change - 2 * self.cross)).sum())
        return max(error, 0.0) / self.spread if self.spread > 0 else 0.0


def ridge_change(gram: np.ndarray, cross: np.ndarray, ridge: float, has_intercept: bool) -> np.ndarray:
    """Return the change of a linear map, [F, R] float64, that brings it closest to its targets.

    It minimises |E - X D|^2 + ridge * mean(diag(X^T X)) * |D|^2 over D. The intercept, if there is one, is the last
    feature (always 1) and is not held back.

    Args:
        gram: [F, F], X^T X.
        cross: [F, R], X^T E, where E is what the present map leaves over.
        ridge: > 0, relative to the mean square of the features.
        has_intercept: whether the last feature is the constant 1.

    Raises:
        ModelError: the sums are not finite.
    """
    if not (np.isfinite(gram).all() and np.isfinite(cross).all()):
        raise ModelError(
            "refit: expected finite sums over the calibration text, found NaN or infinity; the model's activations "
            "overflow; export with --no-refit --surrogate off"
        )
    num_held_back = len(gram) - has_intercept
    penalty = np.zeros(len(gram))
    mean_square = float(np.diag(gram)[:num_held_back].mean())
    penalty[:num_held_back] = max(ridge * mean_square, np.finfo(float).tiny)  # features may be 0 throughout
    return np.linalg.solve(gram + np.diag(penalty), cross)


@dataclass(frozen=True)
class Fitted:
    """A change of a linear map, and what it does to the relative squared error on fitting and kept-aside text."""

    change: np.ndarray  # [F, R] float64
    ridge: float
    error_before: float
    error_after: float
    held_out_before: float
    held_out_after: float

    @property
    def helps(self) -> bool:
        """Whether the error fell on text that nothing was fitted on."""
        return self.held_out_after < self.held_out_before


def fit(fitting: Moments, held_out: Moments, has_intercept: bool, ridges: Sequence[float] = RIDGES) -> Fitted:
    """Return the fit whose ridge, one of `ridges`, does best on the tokens kept aside; no change without any token.

    There is none where every window of text ends within the sink.
    """
    if fitting.num_tokens == 0:  # the sums are singular where an intercept is not held back
        error = held_out.relative_error()
        return Fitted(np.zeros_like(fitting.cross), min(ridges), 0.0, 0.0, error, error)
    changes = {ridge: ridge_change(fitting.gram, fitting.cross, ridge, has_intercept) for ridge in ridges}
    errors = {ridge: held_out.relative_error(change) for ridge, change in changes.items()}
    best = min(errors, key=lambda ridge: errors[ridge])
    return Fitted(
        change=changes[best],
        ridge=best,
        error_before=fitting.relative_error(),
        error_after=fitting.relative_error(changes[best]),
        held_out_before=held_out.relative_error(),
        held_out_after=errors[best],
    )
