/* Mistakes that end in a failed work request. The argument names one; the lines with "posts here" are looked for. */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 4096 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static union ibv_gid gid;
static char memory[SIZE];

static void check(int is_right, const char *what)
{
	if (!is_right) {
		perror(what);
		exit(2);
	}
}

static struct ibv_qp *create(void)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	check(qp != NULL, "ibv_create_qp_ex");
	return qp;
}

static void join(struct ibv_qp *qp, const struct ibv_qp *peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp_num,
				     .max_dest_rd_atomic = 1, .min_rnr_timer = 1,
				     .ah_attr = { .is_global = 1, .port_num = 1, .grh.dgid = gid } };
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
	      "RTR");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				     .max_rd_atomic = 1 };
	check(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
	      "RTS");
}

static void print_status(void)
{
	struct ibv_wc wc;
	do {
		while (ibv_poll_cq(cq, 1, &wc) == 0)
			;
	} while (wc.wr_id != 7);
	printf("status %d\n", wc.status);
}

static void post(struct ibv_qp *qp, enum ibv_wr_opcode opcode)
{
	struct ibv_sge piece = { .addr = (uintptr_t)memory, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 7, .sg_list = &piece, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)memory, 1 } };
	struct ibv_send_wr *bad;
	check(!ibv_post_send(qp, &wr, &bad), "ibv_post_send"); /* posts here */
}

static void wrong_rkey(struct ibv_qp *qp)
{
	post(qp, IBV_WR_RDMA_WRITE);
	print_status();
}

static void wrong_rkey_by_builder(struct ibv_qp *qp)
{
	struct ibv_qp_ex *builder = ibv_qp_to_qp_ex(qp);
	check(builder != NULL, "ibv_qp_to_qp_ex");
	ibv_wr_start(builder);
	builder->wr_id = 7;
	builder->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(builder, 1, (uintptr_t)memory);
	ibv_wr_set_sge(builder, mr->lkey, (uintptr_t)memory, 8);
	check(!ibv_wr_complete(builder), "ibv_wr_complete"); /* the builder posts here */
	print_status();
}

/* Nobody has posted a receive, so the SEND is outstanding when its memory is deregistered. */
static void early_dereg(struct ibv_qp *qp, struct ibv_qp *peer)
{
	struct ibv_mr *other = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge piece = { .addr = (uintptr_t)memory, .length = 8, .lkey = other->lkey };
	struct ibv_recv_wr receive = { .sg_list = &piece, .num_sge = 1 }, *bad;
	post(qp, IBV_WR_SEND);
	check(!ibv_dereg_mr(mr), "ibv_dereg_mr");
	check(!ibv_post_recv(peer, &receive, &bad), "ibv_post_recv");
	print_status();
}

int main(int argc, char **argv)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	check(argc == 2 && devices && devices[0] && (context = ibv_open_device(devices[0])), "ibv_open_device");
	check((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 16, NULL, NULL, 0)), "ibv_create_cq");
	mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE);
	check(mr && !ibv_query_gid(context, 1, 0, &gid), "ibv_query_gid");
	int is_alone = !strcmp(argv[1], "alone");
	struct ibv_qp *qp = create(), *peer = is_alone ? qp : create();
	join(qp, peer);
	if (!is_alone)
		join(peer, qp);
	if (!strcmp(argv[1], "dereg"))
		early_dereg(qp, peer);
	else if (!strcmp(argv[1], "builder"))
		wrong_rkey_by_builder(qp);
	else
		wrong_rkey(qp);
	if (is_alone)
		wrong_rkey_by_builder(qp);
	return 0;
}
