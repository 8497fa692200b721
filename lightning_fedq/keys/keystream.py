"""AES-256-CTR keystreams of many keys in one compiled pass, by the CPU's own AES instructions.

OpenSSL gives the same bytes, and is used on CPUs without such instructions. Through Python, it takes 2.7 us
to begin with a key, and a round of 1,000 small clients has 1,500 keys. Its counter mode uses an eighth of the
capacity that vectors of four blocks use.

References:
    FIPS 197, Advanced Encryption Standard, 5.2 (key expansion).
    NIST SP 800-38A, 6.5 (counter mode).
"""

from functools import cache
from typing import Any

import numba
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from llvmlite import ir
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from numpy.typing import NDArray

_SAID = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
_FEATURES = set() if config.DISABLE_JIT else set(_SAID.split(","))
LANES = 0 if "+aes" not in _FEATURES else 4 if {"+vaes", "+avx512f"} <= _FEATURES else 1
"""Number of 16-byte blocks in a vector of this CPU, or 0 if it has no x86 AES instructions."""
_VECTORS = 8
"""Number of vectors that are encrypted side by side, so that no instruction waits for another."""
_STEP = 16 * _VECTORS * LANES
_ROUNDS = 14
_ZEROS = memoryview(bytes(1 << 16))
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _vector(lanes: int) -> ir.VectorType:
    """Return the LLVM type of a vector of `lanes` blocks."""
    return ir.VectorType(_I64, 2 * lanes)


def _aes(builder: Any, name: str, lanes: int) -> Any:
    """Return LLVM's `aesenc` or `aesenclast` for vectors of `lanes` blocks."""
    kind, width = _vector(lanes), {1: "", 4: ".512"}[lanes]
    called = ir.FunctionType(kind, [kind, kind])
    return cgutils.get_or_insert_function(builder.module, called, f"llvm.x86.aesni.{name}{width}")


@intrinsic  # type: ignore[untyped-decorator]
def _substituted(typing_context: Any, word: Any) -> Any:
    """Apply the S-box to each byte of a word, by an AES last round on four copies of it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = ir.VectorType(_I32, 4)
        state = ir.Constant(words, [0] * 4)
        for place in range(4):
            state = builder.insert_element(state, args[0], _I32(place))
        zero = ir.Constant(_vector(1), [0, 0])
        result = builder.call(_aes(builder, "aesenclast", 1), [builder.bitcast(state, _vector(1)), zero])
        return builder.extract_element(builder.bitcast(result, words), _I32(0))

    return numba.uint32(numba.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _encrypt(typing_context: Any, schedule: Any, first: Any, out: Any, at: Any) -> Any:
    """Encrypt the counters of `_STEP` bytes, and write the blocks to a place in `out`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, one = _vector(LANES), _vector(1)
        arrays = [context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 2)]
        lanes = ir.Constant(ir.VectorType(_I32, 2 * LANES), [0, 1] * LANES)

        def repeated(block: Any) -> Any:
            return builder.shuffle_vector(block, ir.Constant(one, ir.Undefined), lanes)

        words = builder.bitcast(arrays[0], one.as_pointer())
        rounds = range(_ROUNDS + 1)
        keys = [repeated(builder.load(builder.gep(words, [_I32(i)]), align=1)) for i in rounds]
        first = repeated(builder.insert_element(ir.Constant(one, [0, 0]), args[1], _I32(1)))
        reverse = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(kind, [kind]), f"llvm.bswap.v{2 * LANES}i64"
        )
        states = []
        for vector in range(_VECTORS):
            # adds to the lower half only, because a stream never reaches 2^64 blocks
            added = [half * (vector * LANES + lane) for lane in range(LANES) for half in (0, 1)]
            counters = builder.add(first, ir.Constant(kind, added))
            # counters are big-endian, and the first round key is added by xor
            states.append(builder.xor(builder.call(reverse, [counters]), keys[0]))
        for key in keys[1:-1]:
            states = [builder.call(_aes(builder, "aesenc", LANES), [state, key]) for state in states]
        place = builder.bitcast(builder.gep(arrays[1], [args[3]]), kind.as_pointer())
        for vector, state in enumerate(states):
            block = builder.call(_aes(builder, "aesenclast", LANES), [state, keys[-1]])
            builder.store(block, builder.gep(place, [_I32(vector)]), align=1)
        return context.get_dummy_value()

    return numba.void(schedule, numba.uint64, out, numba.int64), generate


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fill(keys: NDArray[np.uint32], starts: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Fill each row of `out` with its keystream. Arguments are those of `keystreams`."""
    schedule, block, size = np.empty(4 * (_ROUNDS + 1), np.uint32), np.empty(_STEP, np.uint8), out.shape[1]
    for row in range(len(keys)):
        constant = np.uint32(1)
        for i in range(len(schedule)):
            if i < 8:
                schedule[i] = keys[row, i]
                continue
            word = schedule[i - 1]
            if i % 4 == 0:  # also for i % 8 == 4, as FIPS 197 says for keys of 8 words
                word = _substituted(word)
            if i % 8 == 0:
                # RotWord of a little-endian word. The S-box works byte by byte, so it may come first.
                word = ((word >> np.uint32(8)) | (word << np.uint32(24))) ^ constant
                constant <<= np.uint32(1)  # there are 7 constants, up to 64, so GF(2^8) needs no reduction
            schedule[i] = schedule[i - 8] ^ word
        stream, done, at = out[row], 0, starts[row]
        while done < size:
            skip = at % 16  # a stream may continue in the middle of a block
            part = min(_STEP - skip, size - done)
            if part == _STEP:
                _encrypt(schedule, np.uint64(at // 16), stream, done)
            else:
                _encrypt(schedule, np.uint64(at // 16), block, 0)
                for i in range(part):
                    stream[done + i] = block[skip + i]
            done, at = done + part, at + part


def keystreams_by_openssl(
    keys: NDArray[np.uint32], starts: NDArray[np.int64], out: NDArray[np.uint8]
) -> None:
    """Do the same as `keystreams` by OpenSSL, on any CPU."""
    for key, start, row in zip(keys, starts.tolist(), out, strict=True):
        counter, skip = modes.CTR((start // 16).to_bytes(16, "big")), start % 16
        update = Cipher(algorithms.AES256(key.tobytes()), counter).encryptor().update_into
        update(_ZEROS[:skip], bytearray(skip))  # the part of the first block before the start
        view = memoryview(row)
        for first in range(0, len(view), len(_ZEROS)):
            part = view[first : first + len(_ZEROS)]
            update(_ZEROS[: len(part)], part)  # zeros in counter mode give the keystream itself


@cache
def _compiled() -> bool:
    """Return whether this CPU has AES instructions, after a test against OpenSSL once a process.

    Clients on other CPUs must draw the same bytes.

    Raises:
        RuntimeError: If the instructions give other bytes than OpenSSL.
    """
    if not LANES:
        return False
    # starts inside a block, so that parts of a step are also tested
    keys, starts = np.arange(8, dtype=np.uint32)[None], np.array([3])
    compiled, wanted = np.empty((2, 1, 2 * _STEP), np.uint8)
    _fill(keys, starts, compiled)
    keystreams_by_openssl(keys, starts, wanted)
    if not np.array_equal(compiled, wanted):
        raise RuntimeError(
            "AES by this CPU's instructions differs from AES by OpenSSL. Start Python with "
            "NUMBA_CPU_FEATURES=+sse2, which uses OpenSSL only."
        )
    return True


def keystreams(keys: NDArray[np.uint32], starts: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Fill each row of an array with its keystream, whose counter begins at 0 (SP 800-38A, 6.5).

    Args:
        keys: `(n, 8)` uint32, one key of 32 bytes a row.
        starts: `(n,)` position in bytes of the keystream at which each row begins.
        out: `(n, size)` uint8 array that is overwritten.

    Raises:
        RuntimeError: If this CPU's instructions give other bytes than OpenSSL.
    """
    (_fill if _compiled() else keystreams_by_openssl)(keys, starts, out)
