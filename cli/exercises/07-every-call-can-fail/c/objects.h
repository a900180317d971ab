#pragma once
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct objects {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    struct ibv_qp *qp;
};

/* Opens the first device, and creates a protection domain, a completion queue, a region of 4096 bytes and an RC queue
 * pair. Returns 0; or -1, with nothing left and every field NULL. */
int set_up(struct objects *o);

/* Releases everything, and sets every field to NULL. */
void tear_down(struct objects *o);

/* The calls are counted: the program knows which objects are left. */
extern int counted_objects;
struct ibv_context *counted_open(struct ibv_device *device);
int counted_close(struct ibv_context *context);
struct ibv_pd *counted_alloc_pd(struct ibv_context *context);
int counted_dealloc_pd(struct ibv_pd *pd);
struct ibv_cq *counted_create_cq(struct ibv_context *context, int cqe, void *p, struct ibv_comp_channel *c, int v);
int counted_destroy_cq(struct ibv_cq *cq);
struct ibv_mr *counted_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access);
int counted_dereg_mr(struct ibv_mr *mr);
struct ibv_qp *counted_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init);
int counted_destroy_qp(struct ibv_qp *qp);
#ifndef COUNTING
#undef ibv_reg_mr
#define ibv_open_device counted_open
#define ibv_close_device counted_close
#define ibv_alloc_pd counted_alloc_pd
#define ibv_dealloc_pd counted_dealloc_pd
#define ibv_create_cq counted_create_cq
#define ibv_destroy_cq counted_destroy_cq
#define ibv_reg_mr counted_reg_mr
#define ibv_dereg_mr counted_dereg_mr
#define ibv_create_qp counted_create_qp
#define ibv_destroy_qp counted_destroy_qp
#endif
