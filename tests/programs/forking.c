/* Forks while WRITEs are outstanding. The parent's traffic must continue; the child's verbs must fail without hanging.
 * Exit code 0 on success; otherwise an error message on stderr. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SIZE = 64 * 1024, DEPTH = 16, WRITES = 4000, FORKS = 20 };

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

struct side {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	unsigned char *memory;
};

static void make(struct ibv_context *context, struct ibv_pd *pd, struct side *side)
{
	side->cq = ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0);
	if (!side->cq)
		fail("ibv_create_cq");
	struct ibv_qp_init_attr init = {
		.send_cq = side->cq,
		.recv_cq = side->cq,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	side->qp = ibv_create_qp(pd, &init);
	if (!side->qp)
		fail("ibv_create_qp");
	side->memory = calloc(1, SIZE);
	side->mr = ibv_reg_mr(pd, side->memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (!side->mr)
		fail("ibv_reg_mr");
}

static void join(struct side *here, const struct side *there, union ibv_gid gid)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	if (ibv_modify_qp(here->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		fail("INIT");
	memset(&attr, 0, sizeof attr);
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_4096;
	attr.dest_qp_num = there->qp->qp_num;
	attr.max_dest_rd_atomic = 1;
	attr.min_rnr_timer = 12;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.grh.dgid = gid;
	attr.ah_attr.grh.hop_limit = 64;
	attr.ah_attr.port_num = 1;
	if (ibv_modify_qp(here->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		fail("RTR");
	memset(&attr, 0, sizeof attr);
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = 1;
	if (ibv_modify_qp(here->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					       IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		fail("RTS");
}

static int post(struct side *from, const struct side *to, uint64_t id)
{
	struct ibv_sge piece = { .addr = (uintptr_t)from->memory, .length = SIZE, .lkey = from->mr->lkey };
	struct ibv_send_wr request = {
		.wr_id = id, .sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = (uintptr_t)to->memory, .rkey = to->mr->rkey },
	};
	struct ibv_send_wr *bad;
	return ibv_post_send(from->qp, &request, &bad);
}

/* No resource of the parent may work in the child. */
static int child(struct ibv_context *context, struct ibv_pd *pd, struct side *from, const struct side *to)
{
	struct ibv_wc wc;
	struct ibv_port_attr port;
	char memory[64];
	if (post(from, to, 1) == 0)
		return 11;
	if (ibv_poll_cq(from->cq, 1, &wc) > 0)
		return 12;
	if (ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE))
		return 13;
	if (ibv_create_cq(context, 1, NULL, NULL, 0))
		return 14;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	if (ibv_modify_qp(from->qp, &attr, IBV_QP_STATE) == 0)
		return 15;
	(void)ibv_query_port(context, 1, &port);
	return 0;
}

int main(void)
{
	if (ibv_fork_init())
		fail("ibv_fork_init");
	struct ibv_device **devices = ibv_get_device_list(NULL);
	if (!devices || !devices[0])
		fail("no device");
	struct ibv_context *context = ibv_open_device(devices[0]);
	if (!context)
		fail("ibv_open_device");
	struct ibv_pd *pd = ibv_alloc_pd(context);
	union ibv_gid gid;
	if (!pd || ibv_query_gid(context, 1, 0, &gid))
		fail("ibv_query_gid");
	struct side from, to;
	make(context, pd, &from);
	make(context, pd, &to);
	join(&from, &to, gid);
	join(&to, &from, gid);
	for (int i = 0; i < SIZE; i++)
		from.memory[i] = (unsigned char)(i * 31 + 7);

	int posted = 0, done = 0, forked = 0;
	while (done < WRITES) {
		while (posted < WRITES && posted - done < DEPTH)
			if (post(&from, &to, posted++))
				fail("ibv_post_send");
		if (forked < FORKS && done >= forked * (WRITES / FORKS)) {
			/* Up to DEPTH WRITEs are outstanding now. */
			forked++;
			pid_t pid = fork();
			if (pid < 0)
				fail("fork");
			if (pid == 0)
				_exit(child(context, pd, &from, &to));
			if (forked % 2) {
				int status;
				if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status)) {
					fprintf(stderr, "the child exited with %#x\n", status);
					return 1;
				}
			}
		}
		struct ibv_wc wc;
		int count = ibv_poll_cq(from.cq, 1, &wc);
		if (count < 0)
			fail("ibv_poll_cq");
		if (count == 0)
			continue;
		if (wc.status != IBV_WC_SUCCESS || wc.wr_id != (uint64_t)done) {
			fprintf(stderr, "write %d: %s\n", done, ibv_wc_status_str(wc.status));
			return 1;
		}
		done++;
	}
	for (int status; wait(&status) > 0;)
		if (!WIFEXITED(status) || WEXITSTATUS(status)) {
			fprintf(stderr, "a child exited with %#x\n", status);
			return 1;
		}
	if (memcmp(from.memory, to.memory, SIZE)) {
		fprintf(stderr, "the received data differs from the written data\n");
		return 1;
	}
	printf("%d writes, %d forks\n", done, forked);
	return 0;
}
