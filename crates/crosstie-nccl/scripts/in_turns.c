// A network plugin for NCCL (version 10 of the interface) that passes each comm to one of several plugins: to the one that was selected when
// the comm was made. So a program can compare plugins call by call. See in_turns.py.
//
//     gcc -O2 -shared -fPIC -o libnccl-net-in_turns.so in_turns.c -ldl
//
// IN_TURNS=PATH[@SPEED],... names the plugins. SPEED, in Mbit/s, is what NCCL is told instead of what the plugin says.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <x86intrin.h>

typedef struct {
    char *name, *pciPath;
    uint64_t guid;
    int ptrSupport, regIsGlobal, forceFlush, speed, port;
    float latency;
    int maxComms, maxRecvs, netDeviceType, netDeviceVersion, ndevs, devs[4];
    size_t maxP2pBytes, maxCollBytes;
} Properties;

typedef struct {
    const char *name;
    int (*init)(void *, void *);
    int (*devices)(int *);
    int (*getProperties)(int, Properties *);
    int (*listen)(int, void *, void **);
    int (*connect)(int, void *, void *, void **, void **);
    int (*accept)(void *, void **, void **);
    int (*regMr)(void *, void *, size_t, int, void **);
    int (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
    int (*deregMr)(void *, void *);
    int (*isend)(void *, void *, size_t, int, void *, void *, void **);
    int (*irecv)(void *, int, void **, size_t *, int *, void **, void **, void **);
    int (*iflush)(void *, int, void **, int *, void **, void **);
    int (*test)(void *, int *, int *);
    int (*closeSend)(void *);
    int (*closeRecv)(void *);
    int (*closeListen)(void *);
    void *others[3];
} Net;

// Kinds of calls that are counted and timed. A call "in vain" found no receive, or a request that is not done.
enum { ISEND, ISEND_VAIN, IRECV, IRECV_VAIN, TEST_SEND, TEST_SEND_VAIN, TEST_RECV, TEST_RECV_VAIN, KINDS, MAX = 8 };
static const char *kinds[] = {"isend", "isend in vain", "irecv", "irecv in vain", "test of a send", "test of a send in vain",
                              "test of a receive", "test of a receive in vain"};
typedef struct {
    int which;
    void *inner;
} Comm;
typedef struct {
    Comm *comm;
    void *inner;
    int is_recv;
} Request;
static Net *nets[MAX];
static int speeds[MAX], count, selected, is_timing;
static uint64_t calls[MAX][KINDS], ticks[MAX][KINDS];

void in_turns_select(int which) { selected = which; }
void in_turns_time(int on) {
    is_timing = on;
    if (on)
        memset(calls, 0, sizeof calls), memset(ticks, 0, sizeof ticks);
}
// Writes what was counted since the last in_turns_time(1): calls per `per`, and ticks of the processor's counter for each.
void in_turns_report(int which, double per, char *to, int len) {
    int n = 0;
    for (int k = 0; k < KINDS; k++)
        if (calls[which][k] && n < len)
            n += snprintf(to + n, len - n, " %s %.1f x %.0f ticks,", kinds[k], calls[which][k] / per,
                          (double)ticks[which][k] / calls[which][k]);
}
static uint64_t now(void) { return is_timing ? __rdtsc() : 0; }
static void note(int which, int kind, uint64_t since) {
    if (is_timing)
        calls[which][kind]++, ticks[which][kind] += __rdtsc() - since;
}

static int init(void *logger, void *profiler) {
    if (count)
        return 0;
    char *list = strdup(getenv("IN_TURNS") ? getenv("IN_TURNS") : ""), *rest;
    for (char *path = strtok_r(list, ",", &rest); path && count < MAX; path = strtok_r(0, ",", &rest)) {
        char *speed = strchr(path, '@');
        if (speed)
            *speed = 0, speeds[count] = atoi(speed + 1);
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        nets[count] = library ? dlsym(library, "ncclNetPlugin_v10") : 0;
        int devices = 0;
        if (!nets[count] || nets[count]->init(logger, profiler) || nets[count]->devices(&devices) || !devices) {
            fprintf(stderr, "%s: %s\n", path, library ? "no usable plugin" : dlerror());
            return 3;
        }
        count++;
    }
    return count ? 0 : 3;
}
static int devices(int *n) { return *n = 1, 0; }
static int getProperties(int device, Properties *to) {
    int rc = nets[selected]->getProperties(device, to);
    if (speeds[selected])
        to->speed = speeds[selected];
    return rc;
}
static Comm *make(int which, void *inner) {
    Comm *comm = malloc(sizeof *comm);
    *comm = (Comm){which, inner};
    return comm;
}
static int listen_(int device, void *handle, void **to) {
    void *inner;
    int rc = nets[selected]->listen(device, handle, &inner);
    *to = rc ? 0 : make(selected, inner);
    return rc;
}
static int connect_(int device, void *config, void *handle, void **to, void **offload) {
    void *inner = 0;
    int rc = nets[selected]->connect(device, config, handle, &inner, offload);
    *to = !rc && inner ? make(selected, inner) : 0;
    return rc;
}
static int accept_(void *listener, void **to, void **offload) {
    Comm *comm = listener;
    void *inner = 0;
    int rc = nets[comm->which]->accept(comm->inner, &inner, offload);
    *to = !rc && inner ? make(comm->which, inner) : 0;
    return rc;
}
static int regMr(void *c, void *data, size_t size, int type, void **to) {
    Comm *comm = c;
    return nets[comm->which]->regMr(comm->inner, data, size, type, to);
}
static int deregMr(void *c, void *memory) {
    Comm *comm = c;
    return nets[comm->which]->deregMr(comm->inner, memory);
}
static void *wrap(Comm *comm, void *inner, int is_recv) {
    if (!inner)
        return 0;
    Request *request = malloc(sizeof *request);
    *request = (Request){comm, inner, is_recv};
    return request;
}
static int isend(void *c, void *data, size_t size, int tag, void *memory, void *profiler, void **to) {
    Comm *comm = c;
    void *inner = 0;
    uint64_t since = now();
    int rc = nets[comm->which]->isend(comm->inner, data, size, tag, memory, profiler, &inner);
    note(comm->which, inner ? ISEND : ISEND_VAIN, since);
    *to = wrap(comm, inner, 0);
    return rc;
}
static int irecv(void *c, int n, void **data, size_t *sizes, int *tags, void **memory, void **profiler, void **to) {
    Comm *comm = c;
    void *inner = 0;
    uint64_t since = now();
    int rc = nets[comm->which]->irecv(comm->inner, n, data, sizes, tags, memory, profiler, &inner);
    note(comm->which, inner ? IRECV : IRECV_VAIN, since);
    *to = wrap(comm, inner, 1);
    return rc;
}
// For memory of the host there is nothing to flush.
static int iflush(void *c, int n, void **data, int *sizes, void **memory, void **to) { return *to = 0, 0; }
static int test(void *r, int *done, int *sizes) {
    Request *request = r;
    Comm *comm = request->comm;
    uint64_t since = now();
    int rc = nets[comm->which]->test(request->inner, done, sizes);
    note(comm->which, (request->is_recv ? TEST_RECV : TEST_SEND) + !*done, since);
    if (*done)
        free(request);
    return rc;
}
static int closeSend(void *c) {
    Comm comm = *(Comm *)c;
    free(c);
    return nets[comm.which]->closeSend(comm.inner);
}
static int closeRecv(void *c) {
    Comm comm = *(Comm *)c;
    free(c);
    return nets[comm.which]->closeRecv(comm.inner);
}
static int closeListen(void *c) {
    Comm comm = *(Comm *)c;
    free(c);
    return nets[comm.which]->closeListen(comm.inner);
}
Net ncclNetPlugin_v10 = {"InTurns", init,    devices, getProperties, listen_, connect_,  accept_,   regMr, 0,
                         deregMr,   isend,   irecv,   iflush,        test,    closeSend, closeRecv, closeListen, {0, 0, 0}};
