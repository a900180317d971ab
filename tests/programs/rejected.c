/* Makes calls that must be rejected, and checks result and errno of each. The test counts the explanations on stderr.
 * With the argument "polls", polls an empty completion queue instead; with "silent-peer", waits for a peer in ERR; with
 * "no-receive", for a peer that posts no receive. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static int rejected;

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static void check(const char *call, int is_rejected, int expected, int line)
{
	if (!is_rejected || errno != expected) {
		printf("line %d: %s: %s, errno %s instead of %s\n", line, call, is_rejected ? "rejected" : "accepted",
		       strerrorname_np(errno), strerrorname_np(expected));
		exit(1);
	}
	rejected++;
}

/* Calls that return an errno, a null pointer, or -1. */
#define CODE(expected, call) do { errno = 0; int code = (call); check(#call, code == (expected), expected, __LINE__); } while (0)
#define NONE(expected, call) do { errno = 0; check(#call, (call) == NULL, expected, __LINE__); } while (0)
#define MINUS(expected, call) do { errno = 0; check(#call, (call) == -1, expected, __LINE__); } while (0)
#define NEGATIVE(expected, call) do { errno = 0; check(#call, (call) == -(expected), expected, __LINE__); } while (0)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static char memory[4096];

static struct ibv_qp *make_qp(enum ibv_qp_type type, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	if (!qp)
		fail("ibv_create_qp");
	return qp;
}

static int to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int to_rtr(struct ibv_qp *qp, uint32_t peer, int is_global, int gid_index)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = is_global, .port_num = 1, .grh = { .sgid_index = gid_index, .hop_limit = 64 } },
	};
	if (ibv_query_gid(context, 1, gid_index ? 0 : 0, &attr.ah_attr.grh.dgid))
		fail("ibv_query_gid");
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int to_rts(struct ibv_qp *qp, int timeout)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .timeout = timeout, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					    IBV_QP_MAX_QP_RD_ATOMIC);
}

static int post(struct ibv_qp *qp, struct ibv_mr *mr)
{
	struct ibv_sge piece = { .addr = (uintptr_t)memory, .length = 64, .lkey = mr->lkey };
	struct ibv_send_wr request = { .wr_id = 7, .sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr *bad;
	return ibv_post_send(qp, &request, &bad);
}

static void devices(void)
{
	struct ibv_port_attr port;
	union ibv_gid gid;
	uint16_t pkey;
	struct ibv_gid_entry entry;
	CODE(EINVAL, ibv_query_port(context, 2, &port));
	MINUS(EINVAL, ibv_query_gid(context, 1, 99, &gid));
	MINUS(EINVAL, ibv_query_gid(context, 3, 0, &gid));
	MINUS(EINVAL, ibv_query_pkey(context, 1, 1, &pkey));
	CODE(EINVAL, ibv_query_gid_ex(context, 1, 99, &entry, 0));
	NEGATIVE(EINVAL, ibv_query_gid_table(context, &entry, 0, 0));
	NONE(EOPNOTSUPP, ibv_reg_dmabuf_mr(pd, 0, 1, 0, 0, 0));
	/* Programs ask the kernel about the device of an index. */
	if (ibv_get_device_index(context->device) != -1)
		fail("ibv_get_device_index");
}

static void protection_domains(void)
{
	struct ibv_pd *busy = ibv_alloc_pd(context);
	struct ibv_mr *mr = ibv_reg_mr(busy, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	if (!busy || !mr)
		fail("ibv_reg_mr");
	CODE(EBUSY, ibv_dealloc_pd(busy));
	NONE(EINVAL, ibv_reg_mr(busy, NULL, 1, 0));
	mr->handle += 1;
	CODE(ENOENT, ibv_dereg_mr(mr));
	mr->handle -= 1;
	busy->handle ^= 0x100;
	CODE(ENOENT, ibv_dealloc_pd(busy));
	NONE(ENOENT, ibv_reg_mr(busy, memory, 1, 0));
	busy->handle ^= 0x100;
	struct ibv_context *other = ibv_open_device(context->device);
	busy->context = other;
	CODE(ENOENT, ibv_dealloc_pd(busy));
	busy->context = context;
	if (!other || ibv_close_device(other))
		fail("the second ibv_open_device");
	if (ibv_dereg_mr(mr))
		fail("ibv_dereg_mr");
	CODE(EINVAL, ibv_dereg_mr(mr));
	if (ibv_dealloc_pd(busy))
		fail("ibv_dealloc_pd");
	CODE(EINVAL, ibv_dealloc_pd(busy));
	NONE(EINVAL, ibv_reg_mr(busy, memory, 1, 0));
	NONE(EINVAL, ibv_alloc_mw(busy, IBV_MW_TYPE_1));
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	if (!mw || ibv_dealloc_mw(mw))
		fail("ibv_alloc_mw");
	CODE(EINVAL, ibv_dealloc_mw(mw));
	struct ibv_ah_attr path = { .port_num = 1 };
	NONE(EINVAL, ibv_create_ah(pd, &path));
	path = (struct ibv_ah_attr){ .is_global = 1, .port_num = 2 };
	NONE(EINVAL, ibv_create_ah(pd, &path));
}

static void completion_queues(void)
{
	struct ibv_device_attr limits;
	struct ibv_wc wc;
	if (ibv_query_device(context, &limits))
		fail("ibv_query_device");
	NONE(EINVAL, ibv_create_cq(context, 0, NULL, NULL, 0));
	NONE(EINVAL, ibv_create_cq(context, limits.max_cqe + 1, NULL, NULL, 0));
	NONE(EINVAL, ibv_create_cq(context, 16, NULL, NULL, 7));
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *other = ibv_create_cq(context, 16, NULL, channel, 0);
	if (!other)
		fail("ibv_create_cq");
	CODE(EBUSY, ibv_destroy_comp_channel(channel));
	CODE(EINVAL, ibv_resize_cq(other, 0));
	other->handle += 5;
	CODE(ENOENT, ibv_destroy_cq(other));
	if (ibv_poll_cq(other, 1, &wc) != 0)
		fail("a poll does not look at the handle");
	other->handle -= 5;
	if (ibv_destroy_cq(other) || ibv_destroy_comp_channel(channel))
		fail("ibv_destroy_cq");
	CODE(EINVAL, ibv_destroy_cq(other));
	NEGATIVE(EINVAL, ibv_poll_cq(other, 1, &wc));
	CODE(EINVAL, ibv_req_notify_cq(other, 0));
	CODE(EINVAL, ibv_destroy_comp_channel(channel));
}

static void shared_receive_queues(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 0, .max_sge = 1 } };
	NONE(EINVAL, ibv_create_srq(pd, &init));
	init.attr.max_wr = 4;
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_qp *qp = make_qp(IBV_QPT_RC, srq);
	CODE(EBUSY, ibv_destroy_srq(srq));
	struct ibv_srq_attr attr = { .max_wr = 3, .srq_limit = 4 };
	struct ibv_recv_wr receive = { 0 }, *bad;
	CODE(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT));
	for (int i = 0; i < 4; i++)
		if (ibv_post_srq_recv(srq, &receive, &bad))
			fail("ibv_post_srq_recv");
	CODE(ENOMEM, ibv_post_srq_recv(srq, &receive, &bad));
	CODE(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR));
	attr.max_wr = 5;
	if (ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) || ibv_query_srq(srq, &attr) || attr.max_wr != 5 ||
	    attr.srq_limit != 4 || ibv_post_srq_recv(srq, &receive, &bad))
		fail("a longer queue");
	CODE(ENOMEM, ibv_post_srq_recv(srq, &receive, &bad));
	attr.max_wr = 1 << 30;
	CODE(EINVAL, ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR));
	if (ibv_destroy_qp(qp) || ibv_destroy_srq(srq))
		fail("ibv_destroy_srq");
	CODE(EINVAL, ibv_destroy_srq(srq));
	CODE(EINVAL, ibv_query_srq(srq, &attr));
}

static void queue_pairs(struct ibv_mr *mr)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1 << 30 } };
	NONE(EINVAL, ibv_create_qp(pd, &init));
	init = (struct ibv_qp_init_attr){ .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET };
	NONE(EOPNOTSUPP, ibv_create_qp(pd, &init));
	init = (struct ibv_qp_init_attr){ .recv_cq = cq, .qp_type = IBV_QPT_RC };
	NONE(EINVAL, ibv_create_qp(pd, &init));
	struct ibv_qp *qp = make_qp(IBV_QPT_RC, NULL);
	struct ibv_recv_wr receive = { 0 }, *bad;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	CODE(EBUSY, ibv_destroy_cq(cq));
	CODE(EINVAL, post(qp, mr));
	CODE(EINVAL, ibv_post_recv(qp, &receive, &bad));
	CODE(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	CODE(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_CAP));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 2 };
	CODE(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	if (to_init(qp))
		fail("INIT");
	CODE(EINVAL, to_rtr(qp, 1, 0, 0));
	CODE(EINVAL, to_rtr(qp, 1, 1, 99));
	receive.num_sge = 1000;
	CODE(EINVAL, ibv_post_recv(qp, &receive, &bad));
	qp->handle += 1;
	CODE(ENOENT, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	CODE(ENOENT, ibv_destroy_qp(qp));
	qp->handle -= 1;
	if (to_rtr(qp, qp->qp_num, 1, 0) || to_rts(qp, 14))
		fail("RTS");
	struct ibv_send_wr request = { .opcode = 77 }, *bad_request;
	CODE(EOPNOTSUPP, ibv_post_send(qp, &request, &bad_request));
	request = (struct ibv_send_wr){ .opcode = IBV_WR_SEND, .send_flags = 1 << 20 };
	CODE(EINVAL, ibv_post_send(qp, &request, &bad_request));
	if (ibv_destroy_qp(qp))
		fail("ibv_destroy_qp");
	CODE(EINVAL, ibv_destroy_qp(qp));
	CODE(EINVAL, post(qp, mr));
	CODE(EINVAL, ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

static void connections(void)
{
	struct rdma_cm_id *id;
	struct rdma_event_channel *channel = rdma_create_event_channel();
	MINUS(EINVAL, rdma_create_id(channel, &id, NULL, 0x7777));
	if (!channel || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
		fail("rdma_create_id");
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	MINUS(EINVAL, rdma_create_qp(id, NULL, &init));
	MINUS(EINVAL, rdma_bind_addr(id, NULL));
	MINUS(EINVAL, rdma_resolve_route(id, 1000));
	int option = 1;
	MINUS(EOPNOTSUPP, rdma_set_option(id, 77, 1, &option, sizeof option));
	if (rdma_destroy_id(id))
		fail("rdma_destroy_id");
	MINUS(EINVAL, rdma_destroy_id(id));
	MINUS(EINVAL, rdma_listen(id, 1));
	rdma_destroy_event_channel(channel);
}

/* Polling never sleeps. */
static int polls(void)
{
	struct rusage before, after;
	struct ibv_wc wc;
	getrusage(RUSAGE_THREAD, &before);
	for (int i = 0; i < 200000; i++)
		if (ibv_poll_cq(cq, 1, &wc) != 0)
			fail("ibv_poll_cq");
	getrusage(RUSAGE_THREAD, &after);
	printf("slept %ld times\n", after.ru_nvcsw - before.ru_nvcsw);
	return 0;
}

/* Waits for ever: for a peer in ERR, which does not answer, with timeout 0, or for a peer that posts no receive. Posts
 * before RTS first. */
static int waits_for_ever(struct ibv_mr *mr, int is_in_error)
{
	struct ibv_qp *here = make_qp(IBV_QPT_RC, NULL), *there = make_qp(IBV_QPT_RC, NULL);
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	if (to_init(here) || to_init(there) || to_rtr(here, there->qp_num, 1, 0) || to_rtr(there, here->qp_num, 1, 1))
		fail("RTR");
	CODE(EINVAL, post(here, mr));
	CODE(EINVAL, post(here, mr));
	if (to_rts(here, is_in_error ? 0 : 14) || (is_in_error && ibv_modify_qp(there, &error, IBV_QP_STATE)) ||
	    post(here, mr))
		fail("RTS");
	puts("waiting");
	fflush(stdout);
	struct ibv_wc wc;
	while (ibv_poll_cq(cq, 1, &wc) == 0)
		usleep(1000);
	return 1;
}

int main(int argc, char **argv)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	if (!list || !list[0] || !(context = ibv_open_device(list[0])))
		fail("no device");
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_mr *mr = pd ? ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE) : NULL;
	if (!cq || !mr)
		fail("set-up");
	if (argc > 1)
		return strcmp(argv[1], "polls") ? waits_for_ever(mr, !strcmp(argv[1], "silent-peer")) : polls();
	devices();
	protection_domains();
	completion_queues();
	shared_receive_queues();
	queue_pairs(mr);
	connections();
	printf("%d calls rejected\n", rejected);
	return 0;
}
