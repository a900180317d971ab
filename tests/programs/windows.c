/* Memory windows as ibv_bind_mw(3) and ibv_post_send(3) describe them, a region without bytes, and datagrams whose
 * queue pair is destroyed at once. Exit code 0 on success; otherwise an error message on stderr. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 4096, DATAGRAMS = 200 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static unsigned char memory[SIZE];
static union ibv_gid gid;

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static void expect(const char *what, int seen, int wanted)
{
	if (seen != wanted) {
		fprintf(stderr, "%s: %d, expected %d\n", what, seen, wanted);
		exit(1);
	}
}

static struct ibv_qp *create(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 2 * DATAGRAMS, .max_recv_wr = DATAGRAMS, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = type,
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	if (!qp)
		fail("ibv_create_qp");
	return qp;
}

static void join(struct ibv_qp *here, const struct ibv_qp *there)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	if (ibv_modify_qp(here, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		fail("INIT");
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = there->qp_num;
	attr.max_dest_rd_atomic = 1;
	attr.min_rnr_timer = 12;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.grh.dgid = gid;
	attr.ah_attr.port_num = 1;
	if (ibv_modify_qp(here, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		fail("RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = 1;
	if (ibv_modify_qp(here, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					   IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		fail("RTS");
}

static struct ibv_wc completion(uint64_t id)
{
	struct ibv_wc wc;
	int count;
	while ((count = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	if (count < 0)
		fail("ibv_poll_cq");
	expect("wr_id", (int)wc.wr_id, (int)id);
	return wc;
}

static enum ibv_wc_status wait_for(uint64_t id)
{
	return completion(id).status;
}

static enum ibv_wc_status write_to(struct ibv_qp *qp, uint32_t rkey, uint64_t address)
{
	struct ibv_sge piece = { .addr = (uintptr_t)memory, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 7, .sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { address, rkey } };
	struct ibv_send_wr *bad;
	if (ibv_post_send(qp, &wr, &bad))
		fail("ibv_post_send");
	return wait_for(7);
}

/* Binds bytes 1024 to 2048. */
static struct ibv_mw_bind_info whole(struct ibv_mr *region, int access)
{
	struct ibv_mw_bind_info info = { region, (uintptr_t)memory + 1024, 1024, access };
	return info;
}

static void type_1(void)
{
	struct ibv_qp *a[2] = { create(IBV_QPT_RC), create(IBV_QPT_RC) };
	struct ibv_qp *b[2] = { create(IBV_QPT_RC), create(IBV_QPT_RC) };
	for (int i = 0; i < 2; i++) {
		join(a[i], b[i]);
		join(b[i], a[i]);
	}
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_mr *plain = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	if (!mw || !plain)
		fail("ibv_alloc_mw, ibv_reg_mr");
	uint32_t before = mw->rkey;
	struct ibv_mw_bind bind = { 1, IBV_SEND_SIGNALED, whole(plain, IBV_ACCESS_REMOTE_WRITE) };
	if (ibv_bind_mw(b[0], mw, &bind))
		fail("ibv_bind_mw");
	expect("the key changes at post", mw->rkey != before, 1);
	expect("a region without IBV_ACCESS_MW_BIND", wait_for(1), IBV_WC_MW_BIND_ERR);
	mw->rkey = before;
	bind.bind_info = whole(mr, IBV_ACCESS_REMOTE_WRITE);
	if (ibv_bind_mw(b[1], mw, &bind))
		fail("the second ibv_bind_mw");
	expect("a correct bind on another queue pair", wait_for(1), IBV_WC_SUCCESS);
	expect("a write through the window", write_to(a[1], mw->rkey, (uintptr_t)memory + 1024), IBV_WC_SUCCESS);
	mw->handle ^= 0x100;
	if (ibv_bind_mw(b[1], mw, &bind))
		fail("a bind does not look at the handle");
	expect("a bind of the window with another handle", wait_for(1), IBV_WC_SUCCESS);
	mw->handle ^= 0x100;
	if (ibv_dealloc_mw(mw) || ibv_dereg_mr(plain))
		fail("ibv_dealloc_mw, ibv_dereg_mr");
	for (int i = 0; i < 2; i++)
		if (ibv_destroy_qp(a[i]) || ibv_destroy_qp(b[i]))
			fail("ibv_destroy_qp");
}

static void type_2(void)
{
	struct ibv_qp *a = create(IBV_QPT_RC), *b = create(IBV_QPT_RC);
	join(a, b);
	join(b, a);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	if (!mw)
		fail("ibv_alloc_mw");
	struct ibv_send_wr wr = { .wr_id = 1, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr *bad;
	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = 0xabcdef42;
	wr.bind_mw.bind_info = whole(mr, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED);
	if (ibv_post_send(b, &wr, &bad))
		fail("IBV_WR_BIND_MW");
	expect("a bind with other upper bits", wait_for(1), IBV_WC_SUCCESS);
	uint32_t key = (mw->rkey & ~0xffu) | 0x42;
	memset(memory, 9, 8);
	expect("a zero-based write", write_to(a, key, 16), IBV_WC_SUCCESS);
	expect("its place", memory[1024 + 16], 9);
	struct ibv_recv_wr receive = { .wr_id = 3 }, *bad_receive;
	struct ibv_send_wr message = { .opcode = IBV_WR_SEND };
	if (ibv_post_recv(b, &receive, &bad_receive) || ibv_post_send(a, &message, &bad))
		fail("a message without bytes");
	expect("the flags of a message", completion(3).wc_flags, 0);
	if (ibv_dealloc_mw(mw) || ibv_destroy_qp(a) || ibv_destroy_qp(b))
		fail("ibv_dealloc_mw, ibv_destroy_qp");
}

static void datagrams(void)
{
	struct ibv_qp *from = create(IBV_QPT_UD), *to = create(IBV_QPT_UD);
	struct ibv_qp *both[2] = { from, to };
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 5 };
		int ok = !ibv_modify_qp(both[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
		attr.qp_state = IBV_QPS_RTR;
		ok = ok && !ibv_modify_qp(both[i], &attr, IBV_QP_STATE);
		attr.qp_state = IBV_QPS_RTS;
		if (!ok || ibv_modify_qp(both[i], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN))
			fail("UD");
	}
	struct ibv_ah_attr path = { .is_global = 1, .grh.dgid = gid, .port_num = 1 };
	struct ibv_ah *ah = ibv_create_ah(pd, &path);
	if (!ah)
		fail("ibv_create_ah");
	struct ibv_sge piece = { .addr = (uintptr_t)memory, .length = 100, .lkey = mr->lkey };
	for (int i = 0; i < DATAGRAMS; i++) {
		struct ibv_recv_wr receive = { .wr_id = i, .sg_list = &piece, .num_sge = 1 }, *bad;
		if (ibv_post_recv(to, &receive, &bad))
			fail("ibv_post_recv");
	}
	struct ibv_sge data = { .addr = (uintptr_t)memory + 2048, .length = 32, .lkey = mr->lkey };
	for (int i = 0; i < DATAGRAMS; i++) {
		struct ibv_send_wr wr = { .sg_list = &data, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = to->qp_num;
		wr.wr.ud.remote_qkey = 5;
		/* The data path does not look at the handle. */
		ah->handle ^= 0x100;
		if (ibv_post_send(from, &wr, &bad))
			fail("ibv_post_send");
	}
	if (ibv_destroy_qp(from) || ibv_destroy_ah(ah))
		fail("ibv_destroy_qp");
	for (int i = 0; i < DATAGRAMS; i++) {
		struct ibv_wc wc = completion(i);
		expect("a datagram", wc.status, IBV_WC_SUCCESS);
		expect("the flags of a datagram", wc.wc_flags, IBV_WC_GRH);
	}
	if (ibv_destroy_qp(to))
		fail("ibv_destroy_qp");
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	if (!devices || !devices[0])
		fail("ibv_get_device_list");
	context = ibv_open_device(devices[0]);
	if (!context || ibv_query_gid(context, 1, 0, &gid))
		fail("ibv_open_device");
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 1000, NULL, NULL, 0);
	mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND);
	struct ibv_mr *empty = ibv_reg_mr(pd, NULL, 0, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mr *empty_here = ibv_reg_mr(pd, memory, 0, IBV_ACCESS_LOCAL_WRITE);
	if (!cq || !mr || !empty || !empty_here)
		fail("ibv_reg_mr");
	type_1();
	type_2();
	datagrams();
	if (ibv_dereg_mr(empty) || ibv_dereg_mr(empty_here) || ibv_dereg_mr(mr) || ibv_destroy_cq(cq) || ibv_dealloc_pd(pd))
		fail("the end");
	puts("windows and datagrams work");
	return 0;
}
