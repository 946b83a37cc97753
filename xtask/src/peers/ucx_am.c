/*
 * Sends requests and replies as UCX active messages between two processes, each pinned to a core, like `crosstie bench
 * copyrpc --processes`. ucx_perftest has no such test.
 *
 * ucx_am PAYLOAD DEPTH SECONDS CLIENT_CORE SERVER_CORE
 *
 * Every message begins with a number. The number of a reply is that of its request plus one, and the client checks every
 * one. It times every 32nd round trip, or every one when the payload is 4 KiB or more. It prints one JSON object.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <ucp/api/ucp.h>

#define CHECK(what, good) \
    do { if (!(good)) { fprintf(stderr, "ucx_am: %s failed\n", what); exit(1); } } while (0)
#define END UINT64_MAX
#define MAX_DEPTH 1024

static size_t payload;
static unsigned depth, sends_in_progress;
static ucp_worker_h worker;
static ucp_ep_h peer;
/* A send buffer and a receive buffer per message in flight. A large message stays in its buffer until it is sent. */
static char *send_buffers[MAX_DEPTH], *receive_buffers[MAX_DEPTH];
static unsigned next_send_buffer, next_receive_buffer;
/* A ring of the numbers that were received. */
static uint64_t arrived[2 * MAX_DEPTH];
static unsigned arrived_head, arrived_tail;

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void add_arrived(const void *message)
{
    memcpy(&arrived[arrived_head++ % (2 * MAX_DEPTH)], message, 8);
}

static void on_received(void *request, ucs_status_t status, size_t length, void *buffer)
{
    CHECK("receiving", status == UCS_OK && length == payload);
    add_arrived(buffer);
    ucp_request_free(request);
}

static void on_sent(void *request, ucs_status_t status, void *data)
{
    (void)data;
    CHECK("sending", status == UCS_OK);
    --sends_in_progress;
    ucp_request_free(request);
}

static ucs_status_t on_message(void *arg, const void *header, size_t header_length, void *data, size_t length,
                               const ucp_am_recv_param_t *param)
{
    (void)arg, (void)header, (void)header_length;
    CHECK("a message's length", length == payload);
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        add_arrived(data);
        return UCS_OK;
    }
    void *buffer = receive_buffers[next_receive_buffer++ % depth];
    ucp_request_param_t options = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                               .cb.recv_am = on_received,
                               .user_data = buffer};
    void *request = ucp_am_recv_data_nbx(worker, data, buffer, length, &options);
    CHECK("receiving", !UCS_PTR_IS_ERR(request));
    if (request == NULL) add_arrived(buffer);
    return UCS_INPROGRESS;
}

static void send_number(uint64_t number)
{
    char *buffer = send_buffers[next_send_buffer++ % depth];
    memcpy(buffer, &number, 8);
    ucp_request_param_t options = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK, .cb.send = on_sent};
    void *request = ucp_am_send_nbx(peer, 0, NULL, 0, buffer, payload, &options);
    CHECK("sending", !UCS_PTR_IS_ERR(request));
    if (request != NULL) ++sends_in_progress;
}

static void open_worker(int socket, int core)
{
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(core, &cpus);
    CHECK("pinning", sched_setaffinity(0, sizeof cpus, &cpus) == 0);
    for (unsigned i = 0; i < depth; i++) {
        send_buffers[i] = memset(aligned_alloc(4096, (payload + 4095) & ~4095ul), 1, payload);
        receive_buffers[i] = memset(aligned_alloc(4096, (payload + 4095) & ~4095ul), 1, payload);
    }
    ucp_params_t features = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_AM};
    ucp_context_h context;
    CHECK("ucp_init", ucp_init(&features, NULL, &context) == UCS_OK);
    ucp_worker_params_t mode = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                .thread_mode = UCS_THREAD_MODE_SINGLE};
    CHECK("ucp_worker_create", ucp_worker_create(context, &mode, &worker) == UCS_OK);
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB, .id = 0, .cb = on_message};
    CHECK("the handler", ucp_worker_set_am_recv_handler(worker, &handler) == UCS_OK);

    ucp_address_t *mine;
    size_t length, theirs;
    CHECK("the address", ucp_worker_get_address(worker, &mine, &length) == UCS_OK);
    CHECK("exchanging addresses", write(socket, &length, sizeof length) == sizeof length);
    CHECK("exchanging addresses", write(socket, mine, length) == (ssize_t)length);
    CHECK("exchanging addresses", recv(socket, &theirs, sizeof theirs, MSG_WAITALL) == sizeof theirs);
    void *address = malloc(theirs);
    CHECK("exchanging addresses", recv(socket, address, theirs, MSG_WAITALL) == (ssize_t)theirs);
    ucp_ep_params_t to = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = address};
    CHECK("ucp_ep_create", ucp_ep_create(worker, &to, &peer) == UCS_OK);
}

static void run_server(void)
{
    for (int over = 0; !over || sends_in_progress > 0;) {
        ucp_worker_progress(worker);
        while (arrived_tail != arrived_head) {
            uint64_t number = arrived[arrived_tail++ % (2 * MAX_DEPTH)];
            over = number == END;
            send_number(number + 1);
        }
    }
    /* UCX may still be sends_in_progress the last reply. */
    for (uint64_t until = now() + 50000000; now() < until;) ucp_worker_progress(worker);
}

static int by_value(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static void run_client(double seconds)
{
    enum { SAMPLES = 1 << 20 };
    uint64_t *samples = malloc(SAMPLES * sizeof *samples), taken = 0, ops = 0, wrong = 0;
    uint64_t every = payload < 4096 ? 32 : 1, next = 0, answered = 0, sampled = END, at = 0, from = 0;
    uint64_t warm = now() + 50000000, begin = 0, end = 0;
    for (;;) {
        /* A send buffer is free when its message is sent, which may be after the reply has arrived. */
        while (next - answered < depth && sends_in_progress < depth && end == 0) {
            if (sampled == END && next >= from) sampled = next, at = now();
            send_number(next++);
        }
        ucp_worker_progress(worker);
        while (arrived_tail != arrived_head) {
            uint64_t number = arrived[arrived_tail++ % (2 * MAX_DEPTH)];
            wrong += number != answered + 1;
            if (answered == sampled) {
                uint64_t t = now();
                if (begin != 0 && taken < SAMPLES) samples[taken++] = t - at;
                if (begin == 0 && t >= warm) begin = t, warm = answered;
                if (begin != 0 && end == 0 && t - begin >= seconds * 1e9) end = t, ops = answered - warm;
                sampled = END, from = next - 1 + every;
            }
            ++answered;
        }
        if (end != 0 && answered == next && sends_in_progress == 0) break;
    }
    send_number(END);
    while (arrived_tail == arrived_head || sends_in_progress > 0) ucp_worker_progress(worker);
    qsort(samples, taken, sizeof *samples, by_value);
    printf("{\"ops_per_s\":%.0f,\"p50_ns\":%llu,\"errors\":%llu}\n", ops * 1e9 / (end - begin),
           (unsigned long long)(taken ? samples[taken / 2] : 0), (unsigned long long)wrong);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    CHECK("the command line", argc == 6);
    payload = strtoul(argv[1], NULL, 10);
    depth = strtoul(argv[2], NULL, 10);
    CHECK("the command line", payload >= 8 && depth >= 1 && depth <= MAX_DEPTH);
    int sockets[2], status;
    CHECK("socketpair", socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    pid_t server = fork();
    CHECK("fork", server >= 0);
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        open_worker(sockets[1], atoi(argv[5]));
        run_server();
        _exit(0);
    }
    open_worker(sockets[0], atoi(argv[4]));
    run_client(atof(argv[3]));
    CHECK("waiting", waitpid(server, &status, 0) == server);
    CHECK("the server", WIFEXITED(status) && WEXITSTATUS(status) == 0);
    _exit(0);
}
