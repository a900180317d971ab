/* ./program works, ./program fails. The grader uses its own copy of this file. */
#define COUNTING
#include "objects.h"

int counted_objects;

static void *created(void *object)
{
    counted_objects += object != NULL;
    return object;
}

static int destroyed(int error)
{
    counted_objects -= error == 0;
    return error;
}

struct ibv_context *counted_open(struct ibv_device *device) { return created(ibv_open_device(device)); }
int counted_close(struct ibv_context *context) { return destroyed(ibv_close_device(context)); }
struct ibv_pd *counted_alloc_pd(struct ibv_context *context) { return created(ibv_alloc_pd(context)); }
int counted_dealloc_pd(struct ibv_pd *pd) { return destroyed(ibv_dealloc_pd(pd)); }
struct ibv_cq *counted_create_cq(struct ibv_context *context, int cqe, void *p, struct ibv_comp_channel *c, int v)
{
    return created(ibv_create_cq(context, cqe, p, c, v));
}
int counted_destroy_cq(struct ibv_cq *cq) { return destroyed(ibv_destroy_cq(cq)); }
struct ibv_mr *counted_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
    return created(ibv_reg_mr(pd, address, length, access));
}
int counted_dereg_mr(struct ibv_mr *mr) { return destroyed(ibv_dereg_mr(mr)); }
struct ibv_qp *counted_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
    return created(ibv_create_qp(pd, init));
}
int counted_destroy_qp(struct ibv_qp *qp) { return destroyed(ibv_destroy_qp(qp)); }

int main(int argc, char **argv)
{
    struct objects o = {0};
    int fails = argc > 1 && !strcmp(argv[1], "fails"), result = set_up(&o);
    if (fails) {
        if (result == 0)
            return fprintf(stderr, "set_up returned 0, although a call failed\n"), 1;
        if (counted_objects)
            return fprintf(stderr, "%d objects are left\n", counted_objects), 1;
        printf("set_up failed, and left nothing\n");
        return 0;
    }
    if (result)
        return fprintf(stderr, "set_up returned %d\n", result), 1;
    if (counted_objects != 5 || !o.context || !o.pd || !o.cq || !o.mr || !o.qp)
        return fprintf(stderr, "%d of 5 objects are there\n", counted_objects), 1;
    tear_down(&o);
    if (counted_objects)
        return fprintf(stderr, "after tear_down, %d objects are left\n", counted_objects), 1;
    printf("all objects are there\n");
    return 0;
}
