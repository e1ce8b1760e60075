"""The KV buffers that both graphs read and write in place, and a graph bound to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pop_runtime.cancel import Cancellation, Cancelled
from pop_runtime.chain import BoundLink, ChainedBinding, ChainedSession
from pop_runtime.device_buffer import Buffer, copy_positions, where, zeros
from pop_runtime.errors import BackendError
from pop_runtime.fixed_step import FixedStep
from pop_runtime.graph_check import ORT_TYPES
from pop_runtime.manifest import Manifest
from pop_runtime.providers import HOST, Place
from pop_runtime.sessions import SessionPair, backend_error, onnxruntime

EMPTY, PRUNED, FULL = 0, 1, 2  # what a position of the cache holds
_STORAGE: dict[str, type[np.generic]] = {  # numpy has no bfloat16: its bits
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
}
_ONNX_TYPES = {"float32": 1, "float16": 10, "bfloat16": 16}  # TensorProto.DataType


@dataclass(frozen=True)
class KvCache:
    """K and V of every layer for `batch` rows, and for each position whether it is empty, pruned or full.

    The buffers lie where the provider computes; in the computer's own memory they are numpy arrays.
    """

    manifest: Manifest
    buffers: dict[str, Buffer]  # by past name: [B, H_kv, S_max, D]
    depth: np.ndarray  # [B, S_max] uint8: EMPTY, PRUNED or FULL
    place: Place = HOST

    @property
    def batch(self) -> int:
        """Number of rows."""
        return int(self.depth.shape[0])

    @property
    def capacity(self) -> int:
        """S_max: how many tokens a row can hold."""
        return int(self.depth.shape[1])

    def row(self, index: int) -> KvCache:
        """Return row `index` as a cache of batch 1 over the same memory."""
        rows = {name: buffer[index : index + 1] for name, buffer in self.buffers.items()}
        return KvCache(self.manifest, rows, self.depth[index : index + 1], self.place)

    def bind(self, binding: onnxruntime.IOBinding | ChainedBinding) -> None:
        """Bind every buffer as past and as present; it has to outlive the binding."""
        onnx_type = _ONNX_TYPES[self.manifest.kv_dtype]
        for past_name, present_name, buffer in self._named():
            bound = where(buffer, onnx_type, self.place)
            binding.bind_input(past_name, *bound)
            binding.bind_output(present_name, *bound)

    def _named(self) -> Iterator[tuple[str, str, Buffer]]:
        """Yield for each buffer its past name, its present name and itself."""
        names = self.manifest
        for layer in range(len(names.kv_layers)):
            for past, present in ((names.past_key, names.present_key), (names.past_value, names.present_value)):
                past_name, present_name = past.format(layer=layer), present.format(layer=layer)
                yield past_name, present_name, self.buffers[past_name]


def allocate_cache(manifest: Manifest, batch: int, capacity: int, place: Place = HOST) -> KvCache:
    """Return an empty cache of `batch` rows of `capacity` tokens, or of as many as an engine prescribes.

    Raises:
        UsageError: the engine at `place` has less room.
        BackendError: the memory is refused (gives the bytes asked for).
    """
    dtype = _STORAGE[manifest.kv_dtype]
    buffers: dict[str, Buffer] = {}
    capacity = place.check(batch, capacity)
    try:
        for layer, kv in enumerate(manifest.kv_layers):
            key_shape = (batch, kv.num_heads, capacity, kv.key_head_size)
            value_shape = (batch, kv.num_heads, capacity, kv.value_head_size)
            buffers[manifest.past_key.format(layer=layer)] = zeros(key_shape, dtype, place)
            buffers[manifest.past_value.format(layer=layer)] = zeros(value_shape, dtype, place)
    except MemoryError as error:
        num_bytes = sum(kv.num_heads * (kv.key_head_size + kv.value_head_size) for kv in manifest.kv_layers)
        num_bytes *= batch * capacity * np.dtype(dtype).itemsize
        raise BackendError(
            f"KV cache: expected {num_bytes} bytes for {batch} x {capacity} tokens, found less; ask for fewer tokens"
        ) from error
    return KvCache(manifest, buffers, np.full((batch, capacity), EMPTY, np.uint8), place)


def grown_cache(cache: KvCache, capacity: int, num_cached: int) -> KvCache:
    """Return a larger cache with the first `num_cached` positions of `cache`, which stays as it is.

    Raises:
        BackendError: the system refuses the memory.
    """
    grown = allocate_cache(cache.manifest, cache.batch, capacity, cache.place)
    copy_positions(grown.buffers, cache.buffers, num_cached, cache.place)
    grown.depth[:, :num_cached] = cache.depth[:, :num_cached]
    return grown


class BoundGraph:
    """One graph bound to one cache: the KV buffers once, per run only the small inputs.

    Args:
        session: the prefill or the decode graph.
        cache: its buffers are past and present at once, so a run updates them in place.
        name: the graph's file, for messages.
        has_logits: whether the graph gives logits.
        fixed_steps: whether single tokens are fed from buffers that keep their place and size (`FixedStep`).
    """

    def __init__(
        self, session: onnxruntime.InferenceSession | ChainedSession, cache: KvCache, name: str, has_logits: bool,
        fixed_steps: bool = False,
    ) -> None:  # fmt: skip
        manifest, self._cache, self._session, self._name = cache.manifest, cache, session, name
        self.binding = session.io_binding()
        cache.bind(self.binding)  # the binding does not keep the memory alive: `_cache` does
        self._ids_name, self._mask_name = manifest.input_ids, manifest.attention_mask
        self._ones = np.ones((1, cache.capacity), np.int64)
        self._one_token = np.zeros((cache.batch, 1), np.int64)  # [B, 1], bound again only after a longer input
        self._bound_tokens = 0
        self._logits: np.ndarray | None = None
        self._logits_kind = ""
        self._never_cancelled = Cancellation()
        if has_logits:
            self._bind_logits()
        self._step: FixedStep | None = None
        if fixed_steps:
            assert not isinstance(session, ChainedSession)  # a provider that records runs has whole graphs
            self._step = FixedStep(session, cache, (_STORAGE[self._logits_kind], _ONNX_TYPES[self._logits_kind]))

    @property
    def place(self) -> Place:
        """Where the buffers lie."""
        return self._cache.place

    def _bind_logits(self) -> None:
        """Bind a logits buffer [B, 1, V] of the type that the graph gives."""
        manifest = self._cache.manifest
        kinds = {value.name: value.type for value in self._session.get_outputs()}
        self._logits_kind = {kind: dtype for dtype, kind in ORT_TYPES.items()}[kinds[manifest.logits]]
        shape = (self._cache.batch, 1, manifest.vocab_size)
        self._logits = np.zeros(shape, _STORAGE[self._logits_kind])
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(self._logits, _ONNX_TYPES[self._logits_kind])
        self.binding.bind_ortvalue_output(manifest.logits, value)
        self._logits_value = value  # the binding does not keep the memory alive

    def run(self, ids: np.ndarray, lengths: np.ndarray, cancellation: Cancellation | None = None) -> None:
        """Feed new tokens and write their K and V in place.

        Args:
            ids: [B, S] int64, right-aligned in time: row b's tokens take its positions `lengths[b] - S .. lengths[b]`.
            lengths: [B] int64, tokens of each row after this run.
            cancellation: ends the run when it is set; what the run has written until then counts for nothing.

        Raises:
            BackendError: ONNX Runtime fails.
            Cancelled: the run was cancelled.
        """
        total = int(lengths.max())
        if self._step is not None and ids.shape[1] == 1:
            self._run_step(self._step, ids, lengths, cancellation)
            return
        mask = self._ones[:, :total]  # [1, T]
        if self._cache.batch > 1:
            mask = (np.arange(total) < lengths[:, None]).astype(np.int64)  # [B, T]
        if ids.shape[1] == 1:
            self._one_token[:] = ids
            ids = self._one_token
        with self._errors(ids.shape[1], total, cancellation):
            if ids.shape[1] != 1 or self._bound_tokens != 1:
                self.binding.bind_cpu_input(self._ids_name, np.ascontiguousarray(ids))
                self._bound_tokens = ids.shape[1]
            self.binding.bind_cpu_input(self._mask_name, mask)
            self._session.run_with_iobinding(self.binding, (cancellation or self._never_cancelled).run_options)

    def _run_step(
        self, step: FixedStep, ids: np.ndarray, lengths: np.ndarray, cancellation: Cancellation | None
    ) -> None:
        """Feed single tokens; a step that has begun is not broken off."""
        assert self._logits is not None
        if cancellation is not None:
            cancellation.check()
        with self._errors(1, int(lengths.max()), cancellation):
            self._logits[:] = step.run(ids, lengths)

    def run_link(self, link: BoundLink, ids: np.ndarray, total: int, cancellation: Cancellation | None = None) -> None:
        """Run one link of a chain, whose hidden states are bound, over the new tokens of a single row.

        Args:
            link: of this graph's binding.
            ids: [1, S] int64.
            total: tokens of the row after this run.
            cancellation: as for `run`, and so are the errors.
        """
        with self._errors(ids.shape[1], total, cancellation):
            link.bind_cpu_input(self._ids_name, np.ascontiguousarray(ids))
            link.bind_cpu_input(self._mask_name, self._ones[:, :total])
            link.run((cancellation or self._never_cancelled).run_options)

    def forget_bound(self) -> None:
        """Bind everything but the KV buffers and logits anew before the next run: links were run by themselves."""
        assert isinstance(self.binding, ChainedBinding)
        self.binding.forget_hidden()
        self._bound_tokens = 0

    @contextmanager
    def _errors(self, num_tokens: int, total: int, cancellation: Cancellation | None) -> Iterator[None]:
        """Turn ONNX Runtime's errors within a run into those of the runtime."""
        try:
            yield
        except Exception as error:  # ONNX Runtime's errors share no base but Exception
            if cancellation is not None and cancellation.is_set:
                raise Cancelled from error
            raise backend_error(self._name, f"a run over {num_tokens} tokens, {total} in all", error) from error

    def logits(self) -> np.ndarray:
        """Return a copy of the last run's logits, [B, V] float32."""
        assert self._logits is not None
        rows = self._logits[:, 0]
        if self._logits_kind == "bfloat16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return rows.astype(np.float32)


def prefill_graph(sessions: SessionPair, cache: KvCache) -> BoundGraph:
    """Return the prefill graph bound to a cache."""
    return BoundGraph(sessions.prefill, cache, cache.manifest.prefill_graph, has_logits=False)


def decode_graph(sessions: SessionPair, cache: KvCache) -> BoundGraph:
    """Return the decode graph bound to a cache, in the way that the pair was opened for."""
    name, fixed_steps = cache.manifest.decode_graph, sessions.target.cuda_graphs
    return BoundGraph(sessions.decode, cache, name, has_logits=True, fixed_steps=fixed_steps)
