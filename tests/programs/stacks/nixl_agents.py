"""Writes 64 MiB between two NIXL agents and compares the contents. UCX_TLS and UCX_NET_DEVICES choose the transport."""
import os, time
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

length, rounds = 16 << 20, 4
agents = [nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("initiator", "target")]
source = np.frombuffer(np.random.default_rng(1).bytes(length), dtype=np.uint8).copy()
target = np.zeros(length, dtype=np.uint8)
registered = [
    agent.register_memory([(memory.ctypes.data, length, 0, "")], "DRAM")
    for agent, memory in zip(agents, (source, target))
]
peer = agents[0].add_remote_agent(agents[1].get_agent_metadata())
ends = [agents[0].get_xfer_descs([(memory.ctypes.data, length, 0)], "DRAM") for memory in (source, target)]
handle = agents[0].initialize_xfer("WRITE", ends[0], ends[1], peer, b"done")
start = time.monotonic()
for _ in range(rounds):
    state = agents[0].transfer(handle)
    while state != "DONE":
        assert state != "ERR", "the transfer failed"
        state = agents[0].check_xfer_state(handle)
elapsed = time.monotonic() - start
notified = 0
while notified < rounds:
    notified += len(agents[1].get_new_notifs().get("initiator", []))
assert (source == target).all(), "the contents differ"
print(f"checked {rounds * length / 1e6 / elapsed:.0f} MB/s", flush=True)
# The agents have threads that do not end.
os._exit(0)
