/* Replicates the blocks of a journal: WRITEs from one queue pair to the memory of another, a few at a time, then a commit
 * record that the other side receives. It waits for completion events, as servers do.
 *
 * Compiled with -DBUGS, six errors are handled wrongly: search for BUG. Without it, every error leads to a message, the
 * release of everything and exit code 1. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS 6
#define WINDOW 3
#define BLOCK_BYTES 512
#define REQUESTS (BLOCKS + 2)
#define CREATE_ATTEMPTS 3
#define PATIENCE_MS 3000
#define POLL_MS 100

enum kind { BLOCK, COMMIT, RECORD };

/* A work request that is posted. Its completion frees it. */
struct request {
    enum kind kind;
    int index;
    int slot;
};

struct replicator {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_mr *journal_mr, *replica_mr, *record_mr;
    struct ibv_qp *primary, *backup;
    char *journal, *replica, *record;
    struct request *posted[REQUESTS];
    int outstanding;
    unsigned events;
};

static int fail(const char *call, int error)
{
    fprintf(stderr, "replicate: %s: %s\n", call, error ? strerror(error) : "failed");
    return -1;
}

static struct request *new_request(struct replicator *r, enum kind kind, int index)
{
    for (int slot = 0; slot < REQUESTS; slot++) {
        if (r->posted[slot])
            continue;
        struct request *request = malloc(sizeof *request);
        if (request)
            *request = (struct request){kind, index, slot};
        return r->posted[slot] = request;
    }
    return NULL;
}

static void free_request(struct replicator *r, struct request *request)
{
    r->posted[request->slot] = NULL;
    free(request);
}

static int open_device(struct replicator *r)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (!list)
        return fail("ibv_get_device_list", errno);
    if (list[0])
        r->context = ibv_open_device(list[0]);
    int error = errno;
    ibv_free_device_list(list);
    return r->context ? 0 : fail("ibv_open_device", error);
}

static int register_memory(struct replicator *r)
{
    r->journal = calloc(BLOCKS, BLOCK_BYTES);
    r->replica = calloc(BLOCKS, BLOCK_BYTES);
    r->record = calloc(2, BLOCK_BYTES);
    if (!r->journal || !r->replica || !r->record)
        return fail("calloc", ENOMEM);
    r->journal_mr = ibv_reg_mr(r->pd, r->journal, BLOCKS * BLOCK_BYTES, 0);
    if (!r->journal_mr)
        return fail("ibv_reg_mr", errno);
    r->replica_mr =
        ibv_reg_mr(r->pd, r->replica, BLOCKS * BLOCK_BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    r->record_mr = r->replica_mr ? ibv_reg_mr(r->pd, r->record, 2 * BLOCK_BYTES, IBV_ACCESS_LOCAL_WRITE) : NULL;
    if (r->record_mr)
        return 0;
    int error = errno;
#ifdef BUGS
    /* BUG 4: the regions that were registered before are forgotten. */
    r->journal_mr = r->replica_mr = NULL;
#endif
    return fail("ibv_reg_mr", error);
}

/* A busy device may have no queue pair for a moment. */
static struct ibv_qp *create_queue_pair(struct replicator *r)
{
    struct ibv_qp_init_attr init = {.send_cq = r->cq,
                                    .recv_cq = r->cq,
                                    .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_RC,
                                    .sq_sig_all = 1};
    struct ibv_qp *qp = NULL;
    for (int attempt = 0; !qp; attempt++) {
        qp = ibv_create_qp(r->pd, &init);
        if (qp)
            break;
#ifdef BUGS
        /* BUG 5: it tries again for ever. */
        if (errno != ENOMEM)
            break;
#else
        if (errno != ENOMEM || attempt + 1 == CREATE_ATTEMPTS)
            break;
#endif
        usleep(100);
    }
    return qp;
}

static int to_init(struct ibv_qp *qp)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int to_rts(struct ibv_qp *qp, const struct ibv_qp *peer, union ibv_gid gid)
{
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peer->qp_num,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12,
                              .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 1}}};
    int error = ibv_modify_qp(qp, &rtr,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    return error ? error
                 : ibv_modify_qp(qp, &rts,
                                 IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                     IBV_QP_MAX_QP_RD_ATOMIC);
}

static int connect_pair(struct replicator *r)
{
    union ibv_gid gid;
    if (ibv_query_gid(r->context, 1, 0, &gid))
        return fail("ibv_query_gid", errno);
    int error = to_init(r->primary);
    if (!error)
        error = to_init(r->backup);
    if (!error)
        error = to_rts(r->backup, r->primary, gid);
    if (!error)
        error = to_rts(r->primary, r->backup, gid);
    return error ? fail("ibv_modify_qp", error) : 0;
}

static int set_up(struct replicator *r)
{
    if (open_device(r))
        return -1;
    if (!(r->channel = ibv_create_comp_channel(r->context)))
        return fail("ibv_create_comp_channel", errno);
    if (!(r->pd = ibv_alloc_pd(r->context)))
        return fail("ibv_alloc_pd", errno);
    if (!(r->cq = ibv_create_cq(r->context, 32, NULL, r->channel, 0)))
        return fail("ibv_create_cq", errno);
    int error = ibv_req_notify_cq(r->cq, 0);
    if (error)
        return fail("ibv_req_notify_cq", error);
    if (register_memory(r))
        return -1;
    if (!(r->primary = create_queue_pair(r)) || !(r->backup = create_queue_pair(r)))
        return fail("ibv_create_qp", errno);
    return connect_pair(r);
}

/* Waits for a completion event, and requests the next one. */
static int wait_for_event(struct replicator *r)
{
#ifndef BUGS
    /* A notification can be lost: the caller looks at the queue from time to time. */
    struct pollfd descriptor = {.fd = r->channel->fd, .events = POLLIN};
    if (poll(&descriptor, 1, POLL_MS) == 0)
        return 0;
#endif
    struct ibv_cq *cq;
    void *context;
    if (ibv_get_cq_event(r->channel, &cq, &context))
        return fail("ibv_get_cq_event", errno);
    r->events++;
    int error = ibv_req_notify_cq(cq, 0);
    return error ? fail("ibv_req_notify_cq", error) : 0;
}

/* After a failure: both queue pairs flush what is posted. */
static int stop_traffic(struct replicator *r)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    int error = ibv_modify_qp(r->primary, &attr, IBV_QP_STATE);
    if (!error)
        error = ibv_modify_qp(r->backup, &attr, IBV_QP_STATE);
    return error ? fail("ibv_modify_qp", error) : 0;
}

/* Handles one completion. Returns 1 if the work request failed. */
static int on_completion(struct replicator *r, const struct ibv_wc *wc)
{
    struct request *request = (struct request *)(uintptr_t)wc->wr_id;
    enum kind kind = request->kind;
    int index = request->index;
    r->outstanding--;
    free_request(r, request);
    if (wc->status == IBV_WC_SUCCESS)
        return 0;
    fprintf(stderr, "replicate: %s %d: %s\n", kind == BLOCK ? "block" : "commit", index,
            ibv_wc_status_str(wc->status));
#ifdef BUGS
    /* BUG 2: what is outstanding is freed, and its completions come later. */
    if (kind == BLOCK && wc->status != IBV_WC_WR_FLUSH_ERR)
        for (int slot = 0; slot < REQUESTS; slot++) {
            free(r->posted[slot]);
            r->posted[slot] = NULL;
        }
    /* BUG 6: a commit that failed is logged, and that is all. */
    if (kind != BLOCK && wc->status != IBV_WC_WR_FLUSH_ERR)
        return 0;
#endif
    return 1;
}

/* Waits until at most `most` work requests are outstanding. */
static int drain(struct replicator *r, int most)
{
    int failed = 0, waited_ms = 0;
    while (r->outstanding > most) {
        struct ibv_wc wc;
        int polled = ibv_poll_cq(r->cq, 1, &wc);
        if (polled < 0)
            return fail("ibv_poll_cq", errno);
        if (polled == 0) {
            if (wait_for_event(r))
                return -1;
#ifndef BUGS
            if ((waited_ms += POLL_MS) > PATIENCE_MS)
                return fail("no completion came", ETIMEDOUT);
#endif
            continue;
        }
        waited_ms = 0;
        if (on_completion(r, &wc) && !failed) {
            failed = 1;
            most = 0;
            if (stop_traffic(r))
                return -1;
        }
    }
    (void)waited_ms;
    return failed ? -1 : 0;
}

static int post(struct replicator *r, enum kind kind, int index)
{
    struct request *request = new_request(r, kind, index);
    if (!request)
        return fail("malloc", ENOMEM);
    struct ibv_sge sge = {(uintptr_t)r->record, BLOCK_BYTES, r->record_mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = (uintptr_t)request, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    if (kind == BLOCK) {
        sge = (struct ibv_sge){(uintptr_t)(r->journal + index * BLOCK_BYTES), BLOCK_BYTES, r->journal_mr->lkey};
        wr.opcode = IBV_WR_RDMA_WRITE;
        wr.wr.rdma.remote_addr = (uintptr_t)(r->replica + index * BLOCK_BYTES);
        wr.wr.rdma.rkey = r->replica_mr->rkey;
    }
#ifdef BUGS
    /* BUG 3: it counts before it posts, and waits for what was not posted. */
    r->outstanding++;
    int error = ibv_post_send(r->primary, &wr, &bad);
#else
    int error = ibv_post_send(r->primary, &wr, &bad);
    r->outstanding += !error;
#endif
    if (!error)
        return 0;
    free_request(r, request);
    return fail("ibv_post_send", error);
}

static int post_record(struct replicator *r)
{
    struct request *request = new_request(r, RECORD, 0);
    if (!request)
        return fail("malloc", ENOMEM);
    struct ibv_sge sge = {(uintptr_t)(r->record + BLOCK_BYTES), BLOCK_BYTES, r->record_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = (uintptr_t)request, .sg_list = &sge, .num_sge = 1}, *bad;
#ifdef BUGS
    /* BUG 1: the result is ignored. Without the receive, the commit waits for a receiver that is ready. */
    ibv_post_recv(r->backup, &wr, &bad);
#else
    int error = ibv_post_recv(r->backup, &wr, &bad);
    if (error) {
        free_request(r, request);
        return fail("ibv_post_recv", error);
    }
#endif
    r->outstanding++;
    return 0;
}

static int replicate(struct replicator *r)
{
    for (int index = 0; index < BLOCKS; index++) {
        memset(r->journal + index * BLOCK_BYTES, 'a' + index, BLOCK_BYTES);
        if (drain(r, WINDOW - 1))
            return -1;
        if (post(r, BLOCK, index)) {
            drain(r, 0);
            return -1;
        }
    }
    if (drain(r, 0))
        return -1;
    strcpy(r->record, "committed");
    if (post_record(r))
        return -1;
    if (post(r, COMMIT, 0)) {
        stop_traffic(r);
        drain(r, 0);
        return -1;
    }
    return drain(r, 0);
}

static int release(const char *call, int error)
{
    return error ? fail(call, error) : 0;
}

/* Releases everything that exists, whatever failed before. */
static int tear_down(struct replicator *r)
{
    int failed = 0;
    if (r->primary)
        failed |= release("ibv_destroy_qp", ibv_destroy_qp(r->primary));
    if (r->backup)
        failed |= release("ibv_destroy_qp", ibv_destroy_qp(r->backup));
    struct ibv_mr *regions[] = {r->journal_mr, r->replica_mr, r->record_mr};
    for (int i = 0; i < 3; i++)
        if (regions[i])
            failed |= release("ibv_dereg_mr", ibv_dereg_mr(regions[i]));
    if (r->cq) {
        ibv_ack_cq_events(r->cq, r->events);
        failed |= release("ibv_destroy_cq", ibv_destroy_cq(r->cq));
    }
    if (r->pd)
        failed |= release("ibv_dealloc_pd", ibv_dealloc_pd(r->pd));
    if (r->channel)
        failed |= release("ibv_destroy_comp_channel", ibv_destroy_comp_channel(r->channel));
    if (r->context)
        failed |= release("ibv_close_device", ibv_close_device(r->context) ? errno : 0);
    for (int slot = 0; slot < REQUESTS; slot++)
        free(r->posted[slot]);
    free(r->journal);
    free(r->replica);
    free(r->record);
    return failed;
}

int main(void)
{
    struct replicator replicator = {0};
    int failed = set_up(&replicator);
    if (!failed)
        failed = replicate(&replicator);
    if (!failed && memcmp(replicator.journal, replicator.replica, BLOCKS * BLOCK_BYTES))
        failed = fail("the replica differs", 0);
    if (!failed && strcmp(replicator.record + BLOCK_BYTES, "committed"))
        failed = fail("the record differs", 0);
    if (tear_down(&replicator))
        failed = -1;
    if (!failed)
        printf("replicated %d blocks\n", BLOCKS);
    return failed ? 1 : 0;
}
