/* Calls verbs in random order with random attributes. Every pointer is valid: objects are used while they exist, and
 * memory as long as the process. The library must reject what is wrong, and at the end everything can be destroyed.
 *
 *	sequences SEED STEPS
 *
 * Exit code 0 on success; otherwise an error message on stderr. With FUZZ defined it has no main, and the fuzz target
 * verbs calls fuzz_verbs. */
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 6, SIZE = 64 * 1024 };

static uint64_t seed;
/* The choices of a fuzzer, in place of the generator's. */
static const uint8_t *input, *input_end;
static struct ibv_context *context;
static union ibv_gid gid;
static unsigned char memory[SIZE] __attribute__((aligned(4096)));

static struct ibv_pd *pds[SLOTS];
static struct ibv_mr *mrs[SLOTS];
static struct ibv_mw *mws[SLOTS];
static struct ibv_cq *cqs[SLOTS];
static struct ibv_srq *srqs[SLOTS];
static struct ibv_ah *ahs[SLOTS];
static struct ibv_qp *qps[SLOTS];
static struct ibv_comp_channel *channel;

static uint32_t any(uint32_t below)
{
	if (input) {
		uint32_t choice = 0;
		for (uint64_t values = 1; values < below && input < input_end; values <<= 8)
			choice = choice << 8 | *input++;
		seed = seed * 31 + choice;
		return choice % below;
	}
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return (seed >> 11) % below;
}

/* Usually one of the usual values, sometimes any. */
static uint32_t value(uint32_t usual)
{
	return any(16) ? any(usual) : (uint32_t)seed;
}

static void fail(const char *what, int code)
{
	fprintf(stderr, "%s: %s\n", what, strerror(code));
	exit(1);
}

/* Destroying fails only while something depends on the object. */
#define DESTROY(table, slot, call)                                  \
	do {                                                        \
		if ((table)[slot]) {                                \
			int code = call((table)[slot]);             \
			if (code == 0)                              \
				(table)[slot] = NULL;               \
			else if (code != EBUSY)                     \
				fail(#call, code);                  \
		}                                                   \
	} while (0)

static struct ibv_sge entry(void)
{
	struct ibv_mr *mr = mrs[any(SLOTS)];
	uint32_t offset = any(SIZE);
	return (struct ibv_sge){
		.addr = (uintptr_t)memory + offset,
		.length = any(8) ? any(SIZE - offset + 1) : (uint32_t)seed,
		.lkey = mr ? mr->lkey : (uint32_t)seed,
	};
}

static void create_qp(int slot)
{
	static const enum ibv_qp_type types[] = { IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_RC, 0x77 };
	struct ibv_pd *pd = pds[any(SLOTS)];
	if (qps[slot] || !pd)
		return;
	struct ibv_qp_init_attr init = {
		.send_cq = cqs[any(SLOTS)],
		.recv_cq = cqs[any(SLOTS)],
		.srq = any(3) ? NULL : srqs[any(SLOTS)],
		.cap = { value(16), value(16), value(4), value(4), value(64) },
		.qp_type = types[any(5)],
		.sq_sig_all = any(2),
	};
	if (init.send_cq && init.recv_cq)
		qps[slot] = ibv_create_qp(pd, &init);
}

static void modify_qp(struct ibv_qp *qp)
{
	struct ibv_qp *peer = qps[any(SLOTS)];
	struct ibv_qp_attr attr = {
		.qp_state = any(8),
		.path_mtu = value(6),
		.qkey = any(2) ? 0x11 : seed,
		.dest_qp_num = peer ? peer->qp_num : seed,
		.qp_access_flags = any(16),
		.ah_attr = { .is_global = any(8) != 0, .port_num = any(8) != 0, .grh = { .dgid = gid, .hop_limit = 64 } },
		.port_num = any(8) != 0,
		.timeout = value(20),
		.retry_cnt = value(8),
		.rnr_retry = value(8),
		.min_rnr_timer = value(32),
		.max_rd_atomic = value(4),
		.max_dest_rd_atomic = value(4),
	};
	static const int masks[] = {
		IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
		IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
		IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			IBV_QP_MIN_RNR_TIMER,
		IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
		IBV_QP_STATE,
	};
	static const enum ibv_qp_state states[] = { IBV_QPS_INIT, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR };
	int step = any(5);
	if (any(4)) {
		attr.qp_state = states[step];
		ibv_modify_qp(qp, &attr, masks[step]);
	} else {
		ibv_modify_qp(qp, &attr, any(1 << 21));
	}
}

static struct ibv_mw_bind_info bind_info(void)
{
	struct ibv_sge sge = entry();
	return (struct ibv_mw_bind_info){
		.mr = mrs[any(SLOTS)], .addr = sge.addr, .length = any(4) ? sge.length : 0, .mw_access_flags = value(64),
	};
}

/* Binds a type 1 window. */
static void bind_mw(struct ibv_qp *qp, struct ibv_mw *mw)
{
	struct ibv_mw_bind bind = { .wr_id = seed, .send_flags = any(8), .bind_info = bind_info() };
	ibv_bind_mw(qp, mw, &bind);
}

static void read_events(void)
{
	struct ibv_cq *cq;
	void *cq_context;
	struct ibv_async_event event;
	if (ibv_get_cq_event(channel, &cq, &cq_context) == 0)
		ibv_ack_cq_events(cq, 1);
	if (ibv_get_async_event(context, &event) == 0)
		ibv_ack_async_event(&event);
}

static void post_send(struct ibv_qp *qp)
{
	struct ibv_sge list[2] = { entry(), entry() };
	struct ibv_mr *mr = mrs[any(SLOTS)];
	struct ibv_qp *peer = qps[any(SLOTS)];
	struct ibv_send_wr wr = {
		.wr_id = seed, .sg_list = list, .num_sge = any(3), .opcode = any(10), .send_flags = any(16),
		.imm_data = seed,
	}, *bad = NULL;
	if (wr.opcode == IBV_WR_LOCAL_INV || wr.opcode == IBV_WR_SEND_WITH_INV)
		wr.invalidate_rkey = mws[0] && any(4) ? mws[0]->rkey : seed;
	if (wr.opcode == IBV_WR_BIND_MW) {
		wr.bind_mw.mw = mws[any(SLOTS)];
		if (!wr.bind_mw.mw)
			return;
		wr.bind_mw.rkey = any(8) ? ibv_inc_rkey(wr.bind_mw.mw->rkey) : seed;
		wr.bind_mw.bind_info = bind_info();
	} else if (qp->qp_type == IBV_QPT_UD) {
		wr.wr.ud.ah = ahs[any(SLOTS)];
		wr.wr.ud.remote_qpn = peer ? peer->qp_num : 0;
		wr.wr.ud.remote_qkey = 0x11;
		if (!wr.wr.ud.ah)
			return;
	} else if (wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)memory + any(SIZE);
		wr.wr.atomic.rkey = mr ? mr->rkey : 0;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)memory + any(SIZE);
		wr.wr.rdma.rkey = mr ? mr->rkey : 0;
	}
	/* Inline data is read here: it must be our memory. */
	for (int i = 0; i < 2; i++)
		if (list[i].addr + list[i].length > (uintptr_t)memory + SIZE)
			wr.send_flags &= ~IBV_SEND_INLINE;
	ibv_post_send(qp, &wr, &bad);
}

static void step(void)
{
	int slot = any(SLOTS);
	struct ibv_pd *pd = pds[any(SLOTS)];
	struct ibv_qp *qp = qps[any(SLOTS)];
	struct ibv_cq *cq = cqs[any(SLOTS)];
	struct ibv_sge sge = entry();
	struct ibv_recv_wr recv = { .wr_id = seed, .sg_list = &sge, .num_sge = any(2) }, *bad;
	switch (any(35)) {
	case 0:
		if (!pds[slot])
			pds[slot] = ibv_alloc_pd(context);
		break;
	case 1: DESTROY(pds, slot, ibv_dealloc_pd); break;
	case 2: case 3:
		if (!mrs[slot] && pd) {
			uint32_t offset = any(SIZE);
			mrs[slot] = ibv_reg_mr(pd, memory + offset, any(SIZE - offset + 1), any(64));
		}
		break;
	case 4: DESTROY(mrs, slot, ibv_dereg_mr); break;
	case 5: case 6:
		if (!cqs[slot])
			cqs[slot] = ibv_create_cq(context, value(64), NULL, any(2) ? channel : NULL, 0);
		break;
	case 7: DESTROY(cqs, slot, ibv_destroy_cq); break;
	case 8:
		if (!srqs[slot] && pd) {
			struct ibv_srq_init_attr init = { .attr = { value(16), value(4), 0 } };
			srqs[slot] = ibv_create_srq(pd, &init);
		}
		break;
	case 9: DESTROY(srqs, slot, ibv_destroy_srq); break;
	case 10:
		if (!ahs[slot] && pd) {
			struct ibv_ah_attr attr = { .is_global = any(8) != 0, .port_num = any(8) != 0, .grh = { .dgid = gid } };
			ahs[slot] = ibv_create_ah(pd, &attr);
		}
		break;
	case 11: DESTROY(ahs, slot, ibv_destroy_ah); break;
	case 12:
		if (!mws[slot] && pd)
			mws[slot] = ibv_alloc_mw(pd, 1 + any(3));
		break;
	case 13: DESTROY(mws, slot, ibv_dealloc_mw); break;
	case 14: case 15: create_qp(slot); break;
	case 16:
		if (!any(4))
			DESTROY(qps, slot, ibv_destroy_qp);
		break;
	case 17: case 18: case 19: case 20:
		if (qp)
			modify_qp(qp);
		break;
	case 21: case 22: case 23:
		if (qp)
			post_send(qp);
		break;
	case 24:
		if (qp)
			ibv_post_recv(qp, &recv, &bad);
		break;
	case 25:
		if (srqs[slot])
			ibv_post_srq_recv(srqs[slot], &recv, &bad);
		break;
	case 26:
		if (cq) {
			struct ibv_wc wc[8];
			if (ibv_poll_cq(cq, 1 + any(8), wc) < 0)
				/* An overflow of the queue. */
				errno = 0;
		}
		break;
	case 27:
		if (cq)
			ibv_req_notify_cq(cq, any(2));
		break;
	case 28:
		if (cq)
			ibv_resize_cq(cq, value(64));
		break;
	case 29:
		if (qp && mws[slot])
			bind_mw(qp, mws[slot]);
		break;
	case 30: case 31: read_events(); break;
	case 32:
		if (srqs[slot]) {
			struct ibv_srq_attr attr = { value(32), value(4), value(16) };
			if (ibv_modify_srq(srqs[slot], &attr, any(4)) == 0 && ibv_query_srq(srqs[slot], &attr))
				fail("ibv_query_srq", errno);
		}
		break;
	case 33:
		if (mrs[slot]) {
			uint32_t offset = any(SIZE);
			ibv_rereg_mr(mrs[slot], any(8), pd, memory + offset, any(SIZE - offset + 1), any(64));
		}
		break;
	default:
		if (qp) {
			struct ibv_qp_attr attr;
			struct ibv_qp_init_attr init;
			if (ibv_query_qp(qp, &attr, IBV_QP_STATE, &init))
				fail("ibv_query_qp", errno);
		}
	}
}

static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	if (!list || !list[0])
		fail("no device", ENODEV);
	context = ibv_open_device(list[0]);
	ibv_free_device_list(list);
	if (!context || ibv_query_gid(context, 1, 0, &gid))
		fail("ibv_open_device", errno);
	channel = ibv_create_comp_channel(context);
	/* Reading an event does not wait for one. */
	if (!channel || fcntl(channel->fd, F_SETFL, O_NONBLOCK) || fcntl(context->async_fd, F_SETFL, O_NONBLOCK))
		fail("ibv_create_comp_channel", errno);
}

/* In the order of dependencies, everything can be destroyed. */
static void close_device(void)
{
	for (int i = 0; i < SLOTS; i++)
		DESTROY(qps, i, ibv_destroy_qp);
	for (int i = 0; i < SLOTS; i++) {
		DESTROY(ahs, i, ibv_destroy_ah);
		DESTROY(mws, i, ibv_dealloc_mw);
	}
	for (int i = 0; i < SLOTS; i++) {
		DESTROY(mrs, i, ibv_dereg_mr);
		DESTROY(srqs, i, ibv_destroy_srq);
		DESTROY(cqs, i, ibv_destroy_cq);
	}
	for (int i = 0; i < SLOTS; i++) {
		DESTROY(pds, i, ibv_dealloc_pd);
		if (qps[i] || mrs[i] || srqs[i] || cqs[i] || pds[i] || mws[i] || ahs[i])
			fail("an object is still in use", EBUSY);
	}
	ibv_destroy_comp_channel(channel);
	if (ibv_close_device(context))
		fail("ibv_close_device", errno);
}

#ifdef FUZZ
void fuzz_verbs(const uint8_t *choices, size_t length)
{
	seed = 1;
	input = choices;
	input_end = choices + length;
	open_device();
	while (input < input_end)
		step();
	close_device();
}
#else
int main(int argc, char **argv)
{
	seed = (argc > 1 ? strtoull(argv[1], NULL, 0) : 1) * 0x9e3779b97f4a7c15u + 1;
	unsigned long steps = argc > 2 ? strtoul(argv[2], NULL, 0) : 1000;
	open_device();
	for (unsigned long i = 0; i < steps; i++)
		step();
	close_device();
	printf("%lu steps\n", steps);
	return 0;
}
#endif
