import pyverbs.enums as e
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.qp import QPAttr


def connect_queue_pair(qp, mine, peer):
    attr = QPAttr(port_num=1)
    attr.path_mtu = e.IBV_MTU_1024
    attr.dest_qp_num = peer["qpn"]
    attr.rq_psn = peer["psn"]
    attr.max_dest_rd_atomic = 1
    attr.min_rnr_timer = 12
    route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=0)
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
    attr.sq_psn = mine["psn"]
    attr.max_rd_atomic = 1
    attr.timeout = 14
    attr.retry_cnt = 7
    attr.rnr_retry = 7
    qp.to_rts(attr)
