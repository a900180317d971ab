/* ./program server PORT, ./program client PORT. The grader uses its own copy of this file. */
#include "blocks.h"

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    int is_server = !strcmp(argv[1], "server"), port = atoi(argv[2]);
    static char buffer[BLOCKS * BLOCK_BYTES];
    struct rdma r = {0};
    rdma_open(&r);
    struct ibv_mr *mr = ibv_reg_mr(r.pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (!mr)
        die("ibv_reg_mr");
    struct ibv_qp_cap cap = {.max_send_wr = QUEUE, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1};
    rdma_create(&r, IBV_QPT_RC, 64, cap, 0);
    r.connection = is_server ? exchange_listen(port) : exchange_dial(port);
    rdma_connect(&r, mr, (struct rdma_options){0});
    if (!is_server) {
        for (int block = 0; block < BLOCKS; block++)
            memset(buffer + block * BLOCK_BYTES, block + 1, BLOCK_BYTES);
        write_blocks(&r, mr);
    }
    barrier(r.connection);
    if (is_server) {
        int right = 0;
        for (int block = 0; block < BLOCKS; block++) {
            char wanted[BLOCK_BYTES];
            memset(wanted, block + 1, BLOCK_BYTES);
            right += !memcmp(buffer + block * BLOCK_BYTES, wanted, BLOCK_BYTES);
        }
        printf("blocks: %d\n", right);
    }
    return 0;
}
