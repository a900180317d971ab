/* Preloaded: shows the device as one for which perftest uses the ibv_wr interface, and says when a program does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	int (*real)(struct ibv_context *, struct ibv_device_attr *) = dlvsym(RTLD_NEXT, "ibv_query_device", "IBVERBS_1.1");
	int code = real(context, attr);
	attr->vendor_id = 0x02c9;
	attr->vendor_part_id = 4123;
	return code;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	struct ibv_qp_ex *(*real)(struct ibv_qp *) = dlvsym(RTLD_NEXT, "ibv_qp_to_qp_ex", "IBVERBS_1.6");
	fputs("the ibv_wr interface is used\n", stderr);
	return real(qp);
}
