import socket
import sys

import pyverbs.enums as e
from pyverbs.wr import RecvWR, SendWR, SGE


def prepare(rdma):
    """On the server, before the queue pair is connected. rdma.qp is in INIT. In pyverbs, a RecvWR has an
    SGE; its length can be 0."""


def write_slot(rdma, slot, slot_bytes):
    """On the client: writes the text at the begin of rdma.mr into a slot of the server, and tells it the number. Waits
    for the completion. SendWR takes imm_data; socket.htonl and socket.ntohl convert."""
    sys.exit("write_slot is not written yet")


def next_slot(rdma):
    """On the server: waits until a slot was written, and returns its number: imm_data of the completion."""
    sys.exit("next_slot is not written yet")
