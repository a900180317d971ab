/* ./program server PORT, ./program client PORT. The grader uses its own copy of this file. */
#include "slots.h"

static const struct {
    int slot;
    const char *text;
} WRITES[] = {{5, "first"}, {2, "second"}, {7, "third"}};
#define COUNT (sizeof WRITES / sizeof *WRITES)

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    int is_server = !strcmp(argv[1], "server"), port = atoi(argv[2]);
    static char buffer[SLOTS * SLOT_BYTES];
    struct rdma r = {0};
    rdma_open(&r);
    struct ibv_mr *mr = ibv_reg_mr(r.pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (!mr)
        die("ibv_reg_mr");
    struct ibv_qp_cap cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1};
    rdma_create(&r, IBV_QPT_RC, 32, cap, 1);
    if (is_server && (errno = prepare(r.qp)))
        die("prepare");
    r.connection = is_server ? exchange_listen(port) : exchange_dial(port);
    rdma_connect(&r, mr, (struct rdma_options){.rnr_retry = 1});
    for (size_t i = 0; i < COUNT; i++) {
        if (!is_server) {
            snprintf(buffer, SLOT_BYTES, "%s", WRITES[i].text);
            write_slot(&r, mr, WRITES[i].slot);
        } else {
            int slot = next_slot(&r);
            if (slot < 0 || slot >= SLOTS) {
                fprintf(stderr, "next_slot returned %d, which is not a slot\n", slot);
                return 1;
            }
            printf("slot %d: %.*s\n", slot, SLOT_BYTES, buffer + slot * SLOT_BYTES);
            fflush(stdout);
        }
    }
    return 0;
}
