"""Payloads of compressed blocks: section 10. What is given here was verified against its key."""

from __future__ import annotations

import zstandard


def stored_len(raw: bytes) -> int:
    """How much of a stored block is ciphertext: up to the last byte that is not zero, in whole cipher blocks."""
    return -(-len(raw.rstrip(b"\0")) // 16) * 16


def unpack(payload: bytes, block_size: int) -> bytes | None:
    """The block of a payload; None where it is none."""
    if len(payload) < 4:
        return None
    codec, made = payload[0], int.from_bytes(payload[1:4], "little")
    if 4 + made > len(payload):
        return None
    content = payload[4 : 4 + made]
    block: bytes | None = None
    if codec == 1:
        block = lz4_block(content, block_size)
    elif codec == 2:
        try:
            block = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(content, max_output_size=block_size)
        except zstandard.ZstdError:
            return None
    return block if block is not None and len(block) == block_size else None


def lz4_block(data: bytes, limit: int) -> bytes | None:
    """The content of a block of the LZ4 block format; None where it is none, or makes more than `limit` bytes."""
    out, at = bytearray(), 0

    def length(nibble: int) -> int:
        nonlocal at
        total = nibble
        while nibble == 15:
            more = data[at]
            at += 1
            total += more
            if more != 255:
                break
        return total

    try:
        while at < len(data):
            token = data[at]
            at += 1
            literals = length(token >> 4)
            if at + literals > len(data) or len(out) + literals > limit:
                return None
            out += data[at : at + literals]
            at += literals
            if at == len(data):
                return bytes(out)
            offset = data[at] | data[at + 1] << 8
            at += 2
            matched = 4 + length(token & 15)
            if offset == 0 or offset > len(out) or len(out) + matched > limit:
                return None
            for _ in range(matched):
                out.append(out[-offset])
    except IndexError:
        pass
    return None
