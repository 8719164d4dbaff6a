// Shows: the exchange in C++, with MPI for the meeting and NVSHMEM's host library for the memory.
//
// Run with: see CMakeLists.txt beside this file; then mpirun -np 4 build/09_mpi_nvshmem
// build/vectors
//
// NVSHMEM is initialised by unique id, so that its own MPI plugin is not needed. Steps are captured
// in a CUDA graph, a graph for each number of tokens, and replayed: what an engine does.
#include <cuda_runtime_api.h>
#include <mpi.h>
#include <nvshmem_host.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "vectors.h"

namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

void check(ep_status status) {
  if (status != EP_OK) throw std::runtime_error(ep_last_error());
}

// Device memory that is freed with its owner.
class Array {
 public:
  explicit Array(size_t bytes) { check(cudaMalloc(&data_, bytes)); }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

class Heap {
 public:
  Heap(int rank, int size) {
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    if (rank == 0) nvshmemx_get_uniqueid(&id);
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    nvshmemx_set_attr_uniqueid_args(rank, size, &id, &attributes);
    if (nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes) != 0) {
      throw std::runtime_error("NVSHMEM does not start");
    }
    own_ = nvshmem_align(EP_BUFFER_ALIGN, EP_BUFFER_BYTES);
    if (own_ == nullptr) throw std::runtime_error("set NVSHMEM_SYMMETRIC_SIZE higher");
    for (int peer = 0; peer < size; peer++) {
      // Load/store addresses: null where there is no NVLink to the peer, which ep_open tells.
      peers_.push_back(reinterpret_cast<uint64_t>(peer == rank ? own_ : nvshmem_ptr(own_, peer)));
    }
  }
  ~Heap() {
    nvshmem_free(own_);
    nvshmemx_hostlib_finalize();
  }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;
  const std::vector<uint64_t>& peers() const { return peers_; }

 private:
  void* own_ = nullptr;
  std::vector<uint64_t> peers_;
};

class Engine {
 public:
  Engine(int rank, const std::vector<uint64_t>& peers, int ranks_on_gpu) {
    ep_options options = EP_OPTIONS_INIT;
    options.rank = rank;
    options.own = peers[rank];
    options.peers = peers.data();
    options.ranks_on_gpu = ranks_on_gpu;
    check(ep_open(&options, &exchange_));
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(ep_arm(exchange_, nullptr));
    MPI_Barrier(MPI_COMM_WORLD);
  }
  ~Engine() {
    cudaDeviceSynchronize();
    for (auto& [tokens, graphs] : graphs_) {
      for (cudaGraphExec_t graph : {graphs.first, graphs.second}) cudaGraphExecDestroy(graph);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    ep_close(exchange_);
    cudaStreamDestroy(stream_);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Rows and results that differ from the oracle's.
  int run(const vectors_step& step) {
    auto& [dispatch, combine] = graphs_of(step);
    size_t tokens = static_cast<size_t>(step.tokens);
    put(x_, step.x, tokens * EP_HIDDEN * 2);
    put(ids_, step.ids, tokens * EP_TOP_K * 4);
    put(weights_, step.weights, tokens * EP_TOP_K * 4);
    put(partials_, step.partials, size_t{EP_ROWS} * EP_HIDDEN * 2);
    put(norm_weight_, step.norm_weight, EP_HIDDEN * 2);
    check(cudaGraphLaunch(dispatch, stream_));
    int wrong = wrong_rows(step);
    check(cudaGraphLaunch(combine, stream_));
    auto out = get<uint16_t>(out_.get(), size_t{EP_MAX_TOKENS} * EP_HIDDEN);
    poll();
    return wrong + vectors_wrong_result(&step, out.data());
  }

 private:
  using Graphs = std::pair<cudaGraphExec_t, cudaGraphExec_t>;

  Graphs& graphs_of(const vectors_step& step) {
    auto found = graphs_.find(step.tokens);
    if (found != graphs_.end()) return found->second;
    auto* ids = static_cast<const int32_t*>(ids_.get());
    auto* weights = static_cast<const float*>(weights_.get());
    // Two graphs, so that this program can look at the rows in between; an engine makes one.
    cudaGraphExec_t dispatch = capture(
        [&] { check(ep_dispatch(exchange_, x_.get(), ids, weights, step.tokens, stream_)); });
    cudaGraphExec_t combine = capture([&] {
      check(ep_combine(exchange_, partials_.get(), ids, norm_weight_.get(), step.eps, out_.get(),
                       step.tokens, stream_));
    });
    return graphs_.emplace(step.tokens, Graphs{dispatch, combine}).first->second;
  }

  template <typename Enqueue>
  cudaGraphExec_t capture(Enqueue enqueue) {
    cudaGraph_t graph;
    cudaGraphExec_t made;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    enqueue();
    check(cudaStreamEndCapture(stream_, &graph));
    check(cudaGraphInstantiate(&made, graph, 0));
    check(cudaGraphDestroy(graph));
    return made;
  }

  int wrong_rows(const vectors_step& want) {
    ep_received rows = EP_RECEIVED_INIT;
    check(ep_rows(exchange_, &rows));
    auto x = get<uint8_t>(rows.x, size_t{EP_ROWS} * EP_HIDDEN);
    auto scales = get<uint8_t>(rows.scales, size_t{EP_ROWS} * EP_SCALES);
    auto ids = get<int32_t>(rows.ids, size_t{EP_ROWS} * EP_TOP_K);
    auto weights = get<float>(rows.weights, size_t{EP_ROWS} * EP_TOP_K);
    auto source = get<int32_t>(rows.source, EP_ROWS * rows.source_stride);
    return vectors_wrong_rows(&want, x.data(), scales.data(), ids.data(), weights.data(),
                              source.data(), rows.source_stride);
  }

  void poll() {
    ep_hang hang = EP_HANG_INIT;
    if (ep_poll(exchange_, &hang) == EP_OK) return;
    char text[512];
    ep_hang_text(&hang, text, sizeof text);
    throw std::runtime_error(text);
  }

  void put(const Array& to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(to.get(), from, bytes, cudaMemcpyHostToDevice, stream_));
  }

  template <typename T>
  std::vector<T> get(const void* from, size_t count) {
    std::vector<T> data(count);
    check(cudaMemcpyAsync(data.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost, stream_));
    check(cudaStreamSynchronize(stream_));
    return data;
  }

  ep_exchange* exchange_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::map<int32_t, Graphs> graphs_;
  Array x_{size_t{EP_MAX_TOKENS} * EP_HIDDEN * 2}, out_{size_t{EP_MAX_TOKENS} * EP_HIDDEN * 2};
  Array partials_{size_t{EP_ROWS} * EP_HIDDEN * 2}, norm_weight_{EP_HIDDEN * 2};
  Array ids_{size_t{EP_MAX_TOKENS} * EP_TOP_K * 4}, weights_{size_t{EP_MAX_TOKENS} * EP_TOP_K * 4};
};

int run(const char* folder, int rank, int size) {
  MPI_Comm node;
  int local_rank, local_size, gpus;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  MPI_Comm_rank(node, &local_rank);
  MPI_Comm_size(node, &local_size);
  check(cudaGetDeviceCount(&gpus));
  check(cudaSetDevice(local_rank % gpus));
  check(cudaFree(nullptr));
  Heap heap(rank, size);
  int ranks_on_gpu = (local_size - 1 - local_rank % gpus) / gpus + 1;
  Engine engine(rank, heap.peers(), ranks_on_gpu);
  int number = 0, wrong = 0;
  vectors_step step;
  for (; vectors_read(folder, number, rank, &step); number++) {
    wrong += engine.run(step);
    vectors_free(&step);
  }
  int all = 0;
  MPI_Allreduce(&wrong, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) {
    std::printf("%d ranks: %d steps %s\n", size, number, all ? "DIFFER" : "came back right");
  }
  return all != 0 || number == 0;
}

}  // namespace

int main(int count, char** words) {
  MPI_Init(&count, &words);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int code = 2;
  if (count != 2 || size != EP_RANKS) {
    if (rank == 0) std::fprintf(stderr, "usage: mpirun -np %d 09_mpi_nvshmem VECTORS\n", EP_RANKS);
  } else {
    try {
      code = run(words[1], rank, size);
    } catch (const std::exception& error) {
      // Ends the other ranks, too: they would wait for this one.
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  }
  MPI_Finalize();
  return code;
}
