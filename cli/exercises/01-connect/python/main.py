"""main.py server PORT, main.py client PORT TEXT. The grader uses its own copy of this file."""

import random
import sys

import pyverbs.enums as e
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPCap, QPInitAttr
from pyverbs.wr import RecvWR, SendWR, SGE

from exchange import Exchange
from solution import connect_queue_pair

BYTES = 4096

role, port = sys.argv[1], int(sys.argv[2])
context = Context(name=get_device_list()[0].name.decode())
pd = PD(context)
cq = CQ(context, 16)
mr = MR(pd, BYTES, e.IBV_ACCESS_LOCAL_WRITE)
init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(max_send_wr=4, max_recv_wr=4), sq_sig_all=1)
qp = QP(pd, init)
connection = Exchange(role, port)
mine = {"qpn": qp.qp_num, "psn": random.randrange(1 << 24), "gid": context.query_gid(1, 0).gid}
peer = connection.exchange(mine)
connect_queue_pair(qp, mine, peer)

if role == "server":
    qp.post_recv(RecvWR(sg=[SGE(mr.buf, BYTES, mr.lkey)], num_sge=1))
connection.barrier()
if role == "client":
    text = sys.argv[3].encode()
    mr.write(text, len(text))
    qp.post_send(SendWR(sg=[SGE(mr.buf, BYTES, mr.lkey)], num_sge=1, opcode=e.IBV_WR_SEND))
count = 0
while not count:
    count, completions = cq.poll()
if completions[0].status != e.IBV_WC_SUCCESS:
    sys.exit(f"the work request failed: status {completions[0].status}")
if role == "server":
    print("received:", mr.read(BYTES, 0).split(b"\0")[0].decode())
connection.barrier()
