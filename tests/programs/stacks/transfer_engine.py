"""Writes 256 MiB between two Mooncake transfer engines and compares the contents: transfer_engine.py rdma DEVICES, or tcp.
With a third argument it writes until that file exists, and reports transfers that failed."""
import os, sys, time
import numpy as np
from mooncake.engine import TransferEngine

protocol, devices = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
length, rounds = 16 << 20, 16
ends = [TransferEngine(), TransferEngine()]
for end in ends:
    assert end.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, devices) == 0
source = np.frombuffer(np.random.default_rng(1).bytes(length), dtype=np.uint8).copy()
target = np.zeros(length, dtype=np.uint8)
for end, memory in zip(ends, (source, target)):
    assert end.register_memory(memory.ctypes.data, length) == 0
peer = f"127.0.0.1:{ends[1].get_rpc_port()}"
write = lambda: ends[0].transfer_sync_write(peer, source.ctypes.data, target.ctypes.data, length) == 0
failed = 0
while len(sys.argv) > 3 and not os.path.exists(sys.argv[3]):
    failed += not write()
# The first transfer connects the engines.
assert write(), "a transfer failed"
start = time.monotonic()
for _ in range(rounds):
    assert write(), "a transfer failed"
elapsed = time.monotonic() - start
assert (source == target).all(), "the contents differ"
print(f"checked {rounds * length / 1e6 / elapsed:.0f} MB/s, {failed} transfers failed before", flush=True)
# The engines have threads that do not end.
os._exit(0)
