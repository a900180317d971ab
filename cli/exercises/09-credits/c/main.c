/* ./program server PORT, ./program client PORT. The grader uses its own copy of this file. */
#include "credits.h"

#define MESSAGES 200
#define BYTES 64
#define WINDOW 32

static char region[64], messages[RECEIVES * BYTES], outgoing[WINDOW * BYTES];

static void post_receive(struct rdma *r, struct ibv_mr *mr, int slot)
{
    struct ibv_sge sge = {.addr = (uintptr_t)messages + slot * BYTES, .length = BYTES, .lkey = mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1}, *bad;
    if (ibv_post_recv(r->qp, &wr, &bad))
        die("ibv_post_recv");
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    int is_server = !strcmp(argv[1], "server"), port = atoi(argv[2]);
    struct rdma r = {0};
    rdma_open(&r);
    struct ibv_mr *mr = ibv_reg_mr(r.pd, region, sizeof region, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    struct ibv_mr *receive_mr = ibv_reg_mr(r.pd, messages, sizeof messages, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_mr *send_mr = ibv_reg_mr(r.pd, outgoing, sizeof outgoing, 0);
    if (!mr || !receive_mr || !send_mr)
        die("ibv_reg_mr");
    struct ibv_qp_cap cap = {
        .max_send_wr = 256, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 16};
    rdma_create(&r, IBV_QPT_RC, 1024, cap, 1);
    for (int slot = 0; is_server && slot < RECEIVES; slot++)
        post_receive(&r, receive_mr, slot);
    r.connection = is_server ? exchange_listen(port) : exchange_dial(port);
    rdma_connect(&r, mr, (struct rdma_options){.rnr_retry = 7});
    if (is_server) {
        int received = 0, in_order = 0;
        while (received < MESSAGES) {
            struct ibv_wc wc = rdma_expect(&r, "server");
            if (wc.opcode != IBV_WC_RECV)
                continue;
            int number;
            memcpy(&number, messages + wc.wr_id * BYTES, sizeof number);
            in_order += number == received;
            received++;
            post_receive(&r, receive_mr, wc.wr_id);
            return_credit(&r, mr, received);
        }
        printf("received in order: %d\n", in_order);
        fflush(stdout);
        barrier(r.connection);
        return 0;
    }
    int outstanding = 0;
    for (int number = 0; number < MESSAGES; number++) {
        take_credit(&r, mr, number);
        char *slot = outgoing + number % WINDOW * BYTES;
        memcpy(slot, &number, sizeof number);
        struct ibv_sge sge = {.addr = (uintptr_t)slot, .length = BYTES, .lkey = send_mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
        if (ibv_post_send(r.qp, &wr, &bad))
            die("ibv_post_send");
        if (++outstanding == WINDOW) {
            rdma_expect(&r, "client");
            outstanding--;
        }
    }
    for (; outstanding; outstanding--)
        rdma_expect(&r, "client");
    barrier(r.connection);
    return 0;
}
