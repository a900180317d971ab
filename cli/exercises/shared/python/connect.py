"""Opens the device and connects a queue pair, as in the first exercise."""

import random

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from exchange import Exchange

ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC


class Rdma:
    """A device, a protection domain, a completion queue and an RC queue pair."""

    def __init__(self, role, port, bytes=4096, max_send_wr=16, max_recv_wr=16, cqe=64, all_signaled=1):
        self.exchange = Exchange(role, port)
        self.context = Context(name=get_device_list()[0].name.decode())
        self.pd = PD(self.context)
        self.cq = CQ(self.context, cqe)
        self.mr = MR(self.pd, bytes, ACCESS)
        cap = QPCap(max_send_wr=max_send_wr, max_recv_wr=max_recv_wr)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=all_signaled)
        self.qp = QP(self.pd, init)

    def endpoint(self):
        return {
            "qpn": self.qp.qp_num,
            "psn": random.randrange(1 << 24),
            "gid": self.context.query_gid(1, 0).gid,
            "address": self.mr.buf,
            "rkey": self.mr.rkey,
        }

    def init(self):
        """Takes the queue pair to INIT: from then on, receives can be posted."""
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        self.qp.to_init(attr)

    def connect(self, timeout=14, retry_cnt=7, rnr_retry=0):
        """Exchanges endpoints and connects the queue pair. Afterwards both programs can send."""
        mine = self.endpoint()
        self.peer = self.exchange.exchange(mine)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = ACCESS
        attr.path_mtu = e.IBV_MTU_1024
        attr.dest_qp_num = self.peer["qpn"]
        attr.rq_psn = self.peer["psn"]
        attr.max_dest_rd_atomic = 4
        attr.min_rnr_timer = 12
        route = GlobalRoute(dgid=GID(self.peer["gid"]), sgid_index=0)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.sq_psn = mine["psn"]
        attr.timeout = timeout
        attr.retry_cnt = retry_cnt
        attr.rnr_retry = rnr_retry
        attr.max_rd_atomic = 4
        # From RESET or from INIT.
        if self.qp.qp_state == e.IBV_QPS_RESET:
            self.qp.to_init(attr)
        self.qp.to_rtr(attr)
        self.qp.to_rts(attr)
        self.exchange.barrier()

    def wait(self):
        """Waits for the next completion."""
        while True:
            count, completions = self.cq.poll()
            if count:
                return completions[0]

    def expect(self, what):
        """Waits for the next completion, which must be a success."""
        completion = self.wait()
        if completion.status != e.IBV_WC_SUCCESS:
            raise SystemExit(f"{what}: status {completion.status}")
        return completion
