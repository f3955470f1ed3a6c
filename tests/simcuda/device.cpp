// Simulated CUDA devices for a build of torch without CUDA, or with it: then they take the place of its own.
//
// Device memory is host memory with CUDA's device type, and every operator on it runs at once on the CPU, through a
// fallback of the dispatcher. What would have happened on a device is written to a timeline (timeline.h). Loaded before
// torch is imported: the hooks of CUDA are looked up once. The functions for Python are in extern "C" below, those that
// take tensors in the operator library "simcuda".

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "timeline.h"

namespace simcuda {
using namespace c10;
using Tensor = at::Tensor;
using Locked = std::lock_guard<std::recursive_mutex>;

constexpr int kDevices = 4;
constexpr auto kWithoutKernels = DispatchKey::IPU;  // no build of torch has kernels for it
constexpr auto kDefaultStream = StreamId{0};
static Timeline& timeline() {
  static auto* made = new Timeline(kDevices);  // never destroyed: tensors outlive static objects
  return *made;
}
static thread_local DeviceIndex current_device = 0;
static thread_local std::vector<StreamId> current_stream(kDevices, kDefaultStream);
static std::set<const void*> pinned;
static std::map<const char*, size_t> registered;  // page-locked by cudaHostRegister, with sizes

// Called under the timeline's lock.
static bool is_page_locked(const void* address) {
  if (pinned.count(address)) return true;
  const auto* place = static_cast<const char*>(address);
  auto after = registered.upper_bound(place);
  return after != registered.begin() && place < (--after)->first + after->second;
}
static void (*observer)(const char* kind, const char* what) = nullptr;

// Tells Python what the timeline has seen. Not called under its lock, since Python has a lock of its own.
static void tell() {
  std::vector<Observation> unseen;
  {
    Locked guard(timeline().lock);
    unseen.swap(timeline().unseen);
  }
  for (const auto& each : unseen)
    if (observer) observer(each.kind.c_str(), each.what.c_str());
}

// Tells torch's CUDA sanitizer, where it is switched on. Not called under the timeline's lock either.
template <typename... Given, typename... Arguments>
static void trace(void (impl::PyInterpreterVTable::*what)(DeviceType, Given...) const, Arguments... arguments) {
  if (const auto* interpreter = impl::GPUTrace::get_trace())
    ((**interpreter).*what)(kCUDA, ((Given)(arguments))...);
}

static int queue_of(DeviceIndex device) { return timeline().queue(device, current_stream[device]); }

// --- memory

struct DeviceMemory final : c10::DeviceAllocator {
  static void release(void* address) {
    if (!address) return;
    trace(&impl::PyInterpreterVTable::trace_gpu_memory_deallocation, address);
    {
      Locked guard(timeline().lock);
      timeline().free(static_cast<char*>(address));
    }
    std::free(address);
  }
  DataPtr allocate(size_t size) override {
    const DeviceIndex device = current_device;
    if (!size) return {nullptr, nullptr, &release, Device(kCUDA, device)};
    void* address = nullptr;
    {
      Locked guard(timeline().lock);
      TORCH_CHECK_WITH(
          OutOfMemoryError, timeline().has_room(device, size) && !posix_memalign(&address, 512, size),
          "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ", static_cast<int>(device),
          " has a total capacity of ", timeline().limit[device], " bytes of which ",
          timeline().limit[device] - timeline().held[device], " bytes is free.");
      timeline().allocate(static_cast<char*>(address), size, device, queue_of(device));
    }
    std::memset(address, 0xFF, size);  // not a number, so that what is used before it is written is seen
    trace(&impl::PyInterpreterVTable::trace_gpu_memory_allocation, address);
    tell();
    return {address, address, &release, Device(kCUDA, device)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t) override {}
  void recordStream(const DataPtr& data, Stream stream) override {
    Locked guard(timeline().lock);
    const int queue = timeline().queue(stream.device_index(), stream.id());
    timeline().record_stream(static_cast<const char*>(data.get()), queue);
  }
  CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
};
static DeviceMemory& device_memory() {
  static auto* made = new DeviceMemory;
  return *made;
}

struct PinnedMemory final : at::HostAllocator {
  static void release(void* address) {
    {
      Locked guard(timeline().lock);
      pinned.erase(address);
    }
    std::free(address);
  }
  DataPtr allocate(size_t size) override {
    void* address = nullptr;
    if (size) {
      TORCH_CHECK(!posix_memalign(&address, 4096, size), "no memory");
      Locked guard(timeline().lock);
      pinned.insert(address);
    }
    return {address, address, &release, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static PinnedMemory& pinned_memory() {
  static auto* made = new PinnedMemory;
  return *made;
}

static bool is_pinned(const Tensor& tensor) {
  Locked guard(timeline().lock);
  return tensor.has_storage() && is_page_locked(tensor.storage().data());
}

// --- devices, streams and events

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point moment;
};

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return Device(kCUDA, current_device); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device device) const override { return stream(device, current_stream[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, kDefaultStream); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> last = kDefaultStream;
    const Stream made = stream(device, ++last);
    trace(&impl::PyInterpreterVTable::trace_gpu_stream_creation, made.id());
    return made;
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream given) const override {
    const Stream before = getStream(given.device());
    current_stream[given.device_index()] = given.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream given) const override { return reinterpret_cast<void*>(given.id()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& given) const override {
    {
      Locked guard(timeline().lock);
      timeline().host_waits(timeline().clock(queue(given)), "stream.synchronize");
    }
    tell();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    {
      Locked guard(timeline().lock);
      timeline().host_waits_for_device(device);
    }
    tell();
  }
  void record(void** event, const Stream& on, const DeviceIndex, const EventFlag) const override {
    if (!*event) {
      *event = new Event;
      trace(&impl::PyInterpreterVTable::trace_gpu_event_creation, *event);
    }
    {
      Locked guard(timeline().lock);
      timeline().launch(queue(on), "");
      *static_cast<Event*>(*event) = {timeline().clock(queue(on)), std::chrono::steady_clock::now()};
    }
    trace(&impl::PyInterpreterVTable::trace_gpu_event_record, *event, on.id());
  }
  void block(void* event, const Stream& waits) const override {
    if (!event) return;
    {
      Locked guard(timeline().lock);
      timeline().follow(queue(waits), static_cast<Event*>(event)->clock);
    }
    trace(&impl::PyInterpreterVTable::trace_gpu_event_wait, event, waits.id());
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    {
      Locked guard(timeline().lock);
      if (event) timeline().host_waits(static_cast<Event*>(event)->clock, "event.synchronize");
    }
    tell();
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    const auto between = static_cast<Event*>(second)->moment - static_cast<Event*>(first)->moment;
    return std::chrono::duration<double, std::milli>(between).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event) trace(&impl::PyInterpreterVTable::trace_gpu_event_deletion, event);
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& on) const override {
    device_memory().recordStream(data, on);
  }

 private:
  static DeviceIndex index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static Stream stream(Device device, StreamId id) {
    return Stream(Stream::UNSAFE, Device(kCUDA, index(device)), id);
  }
  static int queue(const Stream& given) { return timeline().queue(given.device_index(), given.id()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex device) {
    device_ = Device(kCUDA, device);
    key_set_ = DispatchKeySet(DispatchKey::CUDA);
  }
};

static at::Generator& default_generator(DeviceIndex device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (DeviceIndex each = 0; each < kDevices; each++) all->push_back(at::make_generator<Generator>(each));
    return all;
  }();
  return (*made)[device < 0 ? current_device : device];
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return simcuda::current_device; }
  DeviceIndex getCurrentDevice() const override { return simcuda::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { simcuda::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(kCUDA, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override {
    Locked guard(timeline().lock);
    return is_page_locked(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory(); }
  Device getDeviceFromPtr(void* address) const override {
    Locked guard(timeline().lock);
    const int device = timeline().device_of(static_cast<char*>(address));
    TORCH_CHECK(device >= 0, "not device memory");
    return Device(kCUDA, static_cast<DeviceIndex>(device));
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? simcuda::current_device : device);
  }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

// --- tensors

static void access(const Tensor& tensor, bool writes, int queue, uint64_t time, const std::string& by) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage() || !tensor.numel()) return;
  int64_t extent = 1;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) extent += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto* address = static_cast<const char*>(tensor.const_data_ptr());
  timeline().access(address, extent * tensor.element_size(), writes, queue, time, by);
}

// Gives tensors on the CPU that share the memory of device tensors; those of one storage share one again.
class Aliases {
 public:
  Tensor of(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto alias = at::detail::make_tensor<TensorImpl>(storage(tensor), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    auto* made = alias.unsafeGetTensorImpl();
    made->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made->set_wrapped_number(true);
    return alias;
  }
  // The device storage that an alias' storage stands for, if it does.
  std::optional<Storage> behind(const Storage& alias) const {
    for (const auto& [_, each] : made_)
      if (each.alias.is_alias_of(alias)) return each.device;
    return std::nullopt;
  }

 private:
  Storage storage(const Tensor& tensor) {
    const auto* key = tensor.storage().unsafeGetStorageImpl();
    if (auto found = made_.find(key); found != made_.end()) return found->second.alias;
    auto* kept = new Storage(tensor.storage());
    DataPtr data(kept->mutable_data(), kept, [](void* it) { delete static_cast<Storage*>(it); }, Device(kCPU));
    Storage made(Storage::use_byte_size_t(), kept->nbytes(), std::move(data), GetCPUAllocator(), true);
    made_.emplace(key, Both{tensor.storage(), made});
    return made;
  }
  struct Both {
    Storage device, alias;
  };
  std::map<const StorageImpl*, Both> made_;
};

static Tensor on_host(const Tensor& tensor) { return Aliases().of(tensor); }

static Tensor device_tensor(const Tensor& host, Storage storage) {
  auto made =
      at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), host.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return made;
}

static Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<MemoryFormat> format) {
  DeviceGuard guard(device_or_default(device));
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_memory(), keys, dtype_or_default(dtype), format);
}
static Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  DeviceGuard guard(device_or_default(device));
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), keys, dtype_or_default(dtype));
}
static Tensor as_strided(const Tensor& t, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}
static Tensor view(const Tensor& t, SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}
static Tensor reshape_alias(const Tensor& t, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
static const Tensor& resize_(const Tensor& t, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  DeviceGuard guard(t.device());
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}
static Tensor& set_tensor(Tensor& t, const Tensor& source) { return at::native::set_tensor_(t, source); }
static Tensor& set_storage(Tensor& t, Storage source) { return at::native::set_(t, std::move(source)); }
static Tensor& set_offset(Tensor& t, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(t, std::move(source), offset, size, stride);
}

// --- copies

// Why the host waits for a copy between host and device, as cudaMemcpyAsync documents it; empty where it does not.
static std::string wait_of(const Tensor& to, const Tensor& from, bool non_blocking) {
  const std::string direction = to.is_cuda() ? "copy to the device" : "copy to the host";
  if (!is_pinned(to.is_cuda() ? from : to)) return direction + ", pageable";
  return non_blocking ? "" : direction + ", blocking";
}

static Tensor& copy_(Tensor& to, const Tensor& given, bool non_blocking) {
  if (to.is_same(given)) return to;
  at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor from = given.sizes() == to.sizes() ? given : given.expand(to.sizes());
  const bool between = to.is_cuda() && from.is_cuda();
  const std::string why = between ? "" : wait_of(to, from, non_blocking);
  {
    Locked locked(timeline().lock);
    const int queue = queue_of((from.is_cuda() ? from : to).device().index());
    const int other = between ? queue_of(to.device().index()) : queue;
    timeline().follow(queue, timeline().clock(other));  // torch orders a copy after and before both devices' streams
    const std::string by = between ? "copy_" : to.is_cuda() ? "copy_ to the device" : "copy_ to the host";
    const auto time = timeline().launch(queue, by);
    access(from, false, queue, time, by);
    access(to, true, queue, time, by);
    timeline().follow(other, timeline().clock(queue));
    if (!between) (to.is_cuda() ? timeline().to_device : timeline().to_host) += to.nbytes();
    if (!why.empty()) timeline().host_waits(timeline().clock(queue), why);
  }
  tell();
  Aliases aliases;
  auto target = aliases.of(to);
  at::native::copy_(target, aliases.of(from), false);
  return to;
}
static Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, from, non_blocking);
}
static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  auto target = to;
  target.resize_(from.sizes());
  return copy_(target, from, false);
}
static at::Scalar local_scalar(const Tensor& tensor) {
  {
    Locked guard(timeline().lock);
    const int queue = queue_of(tensor.device().index());
    access(tensor, false, queue, timeline().launch(queue, "item"), "item");
    timeline().host_waits(timeline().clock(queue), "item");
  }
  tell();
  at::AutoDispatchBelowADInplaceOrView guard;
  return on_host(tensor).item();
}

// --- every other operator

static const std::set<std::string> kWaits{  // their results have a size, or are a number, that the host must know
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::is_nonzero", "aten::repeat_interleave"};
static const std::set<std::string> kMixes{  // take indices on the CPU for a tensor on a device
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_foreach_copy_"};

static const std::map<std::string, const char*> kUnordered{  // alert in deterministic mode, by this name
    {"aten::_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward_cuda"},
    {"aten::upsample_bilinear2d_backward", "upsample_bilinear2d_backward_out_cuda"},
    {"aten::reflection_pad2d_backward", "reflection_pad2d_backward_cuda"},
    {"aten::grid_sampler_2d_backward", "grid_sampler_2d_backward_cuda"},
    {"aten::nll_loss2d_forward", "nll_loss2d_forward_out_cuda_template"}};

// Lets the CPU's generator draw what the device's would.
class Drawing {
 public:
  Drawing(const OperatorHandle& op, std::optional<at::Generator> given, DeviceIndex device)
      : is_needed_(op.hasTag(at::Tag::nondeterministic_seeded)) {
    if (!is_needed_) return;
    turn().lock();
    own_ = given && given->device().is_cuda() ? *given : default_generator(device);
    host_ = host().get_state();
    host().set_state(own_.get_state());
  }
  ~Drawing() {
    if (!is_needed_) return;
    own_.set_state(host().get_state());
    host().set_state(host_);
    turn().unlock();
  }

 private:
  static at::Generator host() { return at::detail::getDefaultCPUGenerator(); }
  static std::recursive_mutex& turn() {
    static auto* made = new std::recursive_mutex;
    return *made;
  }
  bool is_needed_;
  at::Generator own_;
  Tensor host_;
};

// One call of an operator: its arguments become aliases on the CPU, its results tensors on the device.
class Call {
 public:
  Call(const OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), name_(toString(schema_.operator_name())), stack_(stack) {}

  void run() {
    take_arguments();
    const Device device = device_.value_or(Device(kCUDA, current_device));
    TORCH_CHECK(
        host_.empty() || given_.empty() || kMixes.count(schema_.name()),
        "Expected all tensors to be on the same device, but found at least two devices, ", device, " and cpu! (",
        name_, "; on the cpu: ", host_, ")");
    if (auto found = kUnordered.find(schema_.name()); found != kUnordered.end())
      at::globalContext().alertNotDeterministic(found->second);
    DeviceGuard guard(device);
    {
      Locked locked(timeline().lock);
      queue_ = queue_of(device.index());
      time_ = timeline().launch(queue_, name_);
      for (const auto& each : given_) access(each.tensor, each.writes, queue_, time_, name_);
      if (kWaits.count(schema_.name())) timeline().host_waits(timeline().clock(queue_), name_);
    }
    tell();
    {
      Drawing drawing(op_, generator_, device.index());
      at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(stack_);
    }
    for (const auto& each : given_)
      if (each.writes) follow_alias(each.tensor, each.alias);
    give_results();
    tell();
  }

 private:
  struct Given {
    Tensor tensor, alias;
    bool writes;
  };

  void take_arguments() {
    const auto& arguments = schema_.arguments();
    const size_t first = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      const bool writes = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      IValue& value = (*stack_)[first + i];
      if (value.isTensor()) {
        value = alias(value.toTensor(), writes);
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor each : value.toTensorList()) list.push_back(alias(each, writes));
        value = list;
      } else if (value.isList()) {  // of tensors that may be missing
        auto list = value.toList().copy();
        for (size_t k = 0; k < list.size(); k++)
          if (const IValue each = list.get(k); each.isTensor()) list.set(k, alias(each.toTensor(), writes));
        value = list;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        device_ = value.toDevice().has_index() ? value.toDevice() : Device(kCUDA, current_device);
        value = Device(kCPU);
      } else if (value.isGenerator()) {
        generator_ = value.toGenerator();
        value = IValue();
      }
    }
  }

  Tensor alias(const Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.device().is_cpu() && tensor.dim() > 0)
        host_ = std::string(tensor.dtype().name()) + " of " + std::to_string(tensor.numel());
      return tensor;
    }
    TORCH_CHECK(
        !device_ || *device_ == tensor.device(), "Expected all tensors to be on the same device, but found at least ",
        "two devices, ", *device_, " and ", tensor.device(), "! (", name_, ")");
    device_ = tensor.device();
    given_.push_back({tensor, aliases_.of(tensor), writes});
    return given_.back().alias;
  }

  // An operator may have given an alias that it wrote to another size or other memory.
  static void follow_alias(const Tensor& tensor, const Tensor& alias) {
    if (alias.storage().data() != tensor.storage().data() || alias.storage().nbytes() != tensor.storage().nbytes()) {
      tensor.resize_(alias.sizes());
      on_host(tensor).copy_(alias);
    } else {
      auto* impl = tensor.unsafeGetTensorImpl();
      impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  void give_results() {
    const size_t first = stack_->size() - schema_.returns().size();
    for (size_t i = first; i < stack_->size(); i++) {
      IValue& value = (*stack_)[i];
      if (value.isTensor()) {
        value = result(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor each : value.toTensorList()) list.push_back(result(each));
        value = list;
      }
    }
  }

  Tensor result(const Tensor& host) {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (const auto& each : given_)
      if (each.alias.is_same(host)) return each.tensor;
    if (auto storage = aliases_.behind(host.storage())) return device_tensor(host, *storage);
    auto* key = host.storage().unsafeGetStorageImpl();
    auto found = made_.find(key);
    if (found == made_.end()) {
      const size_t size = host.storage().nbytes();
      auto data = device_memory().allocate(size);
      if (size) std::memcpy(data.get(), host.storage().data(), size);
      Storage storage(Storage::use_byte_size_t(), size, std::move(data), &device_memory(), true);
      found = made_.emplace(key, std::move(storage)).first;
    }
    auto made = device_tensor(host, found->second);
    Locked guard(timeline().lock);
    access(made, true, queue_, time_, name_);
    return made;
  }

  const OperatorHandle& op_;
  const FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack* stack_;
  Aliases aliases_;
  std::vector<Given> given_;
  std::optional<Device> device_;
  std::optional<at::Generator> generator_;
  std::string host_;  // describes a tensor on the CPU
  std::map<StorageImpl*, Storage> made_;
  int queue_ = 0;
  uint64_t time_ = 0;
};

static void run_on_host(const OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

static void run_composite(const OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(DispatchKeySet(kWithoutKernels), stack);
}

// Takes the place of the kernels that a CUDA build has, so that each operator runs as in a CPU build: made of others
// where torch knows how, else on the CPU.
static void replace_kernels(torch::Library& library) {
  struct Silent final : WarningHandler {
    void process(const Warning&) override {}  // that kernels are replaced
  } silent;
  WarningUtils::WarningHandlerGuard guard(&silent);
  auto& dispatcher = Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA)) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.getNamespace() != "aten") continue;
    auto run = op->hasComputedKernelForDispatchKey(kWithoutKernels)
                   ? torch::CppFunction::makeFromBoxedFunction<&run_composite>()
                   : torch::CppFunction::makeFromBoxedFunction<&run_on_host>();
    library.impl(toString(name).c_str(), std::move(run));
  }
}

static void record_stream(Tensor& tensor, Stream stream) {
  if (tensor.has_storage()) device_memory().recordStream(tensor.storage().data_ptr(), stream);
}
static int64_t math_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;
}

// The fused cell of an LSTM has no kernel on a CPU: it is made of operators that have one.
static std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& of_input, const Tensor& of_hidden, const Tensor& cx, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  Tensor gates = of_input + of_hidden;
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias.has_value() && bias->defined()) gates = gates + *bias;
  const auto parts = gates.chunk(4, 1);
  const Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  const Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}
static std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3], squashed = cy.tanh();
  const Tensor of_hy = grad_hy.has_value() && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  Tensor of_cy = of_hy * out * (1 - squashed * squashed);
  if (grad_cy.has_value() && grad_cy->defined()) of_cy = of_cy + *grad_cy;
  const Tensor gates = at::cat(
      {of_cy * cell * in * (1 - in), of_cy * cx * forget * (1 - forget), of_cy * in * (1 - cell * cell),
       of_hy * squashed * out * (1 - out)},
      1);
  return {gates, of_cy * forget, has_bias ? gates.sum(0) : Tensor()};
}

// --- what Python calls with tensors

// Notes that a stream has read or written a tensor, and keeps the memory for it.
static void note_access(const Tensor& tensor, bool writes, int64_t stream, const std::string& by, bool is_launch) {
  {
    Locked guard(timeline().lock);
    const int queue = timeline().queue(tensor.device().index(), stream);
    access(tensor, writes, queue, timeline().launch(queue, is_launch ? by : ""), by);
  }
  device_memory().recordStream(tensor.storage().data_ptr(), Stream(Stream::UNSAFE, tensor.device(), stream));
  tell();
}
static void resize_storage(const Tensor& of, int64_t size) {
  auto* storage = of.storage().unsafeGetStorageImpl();
  if (storage->nbytes() == static_cast<size_t>(size)) return;
  DeviceGuard guard(of.device());
  auto data = device_memory().allocate(size);
  if (const size_t kept = std::min<size_t>(size, storage->nbytes())) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size);
}
}  // namespace simcuda

namespace at {
using simcuda::Hooks;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}  // namespace at
namespace c10d {
// Measures nothing; DistributedDataParallel asks for one.
struct SimulatedTimer : Timer {
  explicit SimulatedTimer(c10::Device) {}
  void record(Event) override {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
static std::unique_ptr<Timer> simulated_timer(c10::Device device) { return std::make_unique<SimulatedTimer>(device); }
}  // namespace c10d
namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &simcuda::math_attention)
}

TORCH_LIBRARY(simcuda, m) {
  m.def("host_alias(Tensor t) -> Tensor", simcuda::on_host);
  m.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return simcuda::default_generator(static_cast<c10::DeviceIndex>(device));
  });
  m.def("note_access(Tensor t, bool writes, int stream, str by, bool is_launch) -> ()", simcuda::note_access);
  m.def("resize_storage(Tensor t, int size) -> ()", simcuda::resize_storage);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&simcuda::run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  simcuda::replace_kernels(m);
  m.impl("empty.memory_format", simcuda::empty);
  m.impl("empty_strided", simcuda::empty_strided);
  m.impl("as_strided", simcuda::as_strided);
  m.impl("view", simcuda::view);
  m.impl("_reshape_alias", simcuda::reshape_alias);
  m.impl("resize_", simcuda::resize_);
  m.impl("set_.source_Tensor", simcuda::set_tensor);
  m.impl("set_.source_Storage", simcuda::set_storage);
  m.impl("set_.source_Storage_storage_offset", simcuda::set_offset);
  m.impl("copy_", simcuda::copy_);
  m.impl("_copy_from", simcuda::copy_from);
  m.impl("_copy_from_and_resize", simcuda::copy_from_and_resize);
  m.impl("_local_scalar_dense", simcuda::local_scalar);
  m.impl("record_stream", simcuda::record_stream);
  m.impl("_thnn_fused_lstm_cell", simcuda::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", simcuda::lstm_cell_backward);
  // One launch on a device, many on a CPU: they do not reach the fallback by themselves.
  for (const char* name :
       {"_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_mul_.Scalar", "_foreach_mul_.List",
        "_foreach_mul_.Tensor", "_foreach_div_.List", "_foreach_div_.Scalar", "_foreach_div_.ScalarList",
        "_foreach_div_.Tensor", "_foreach_sub_.List", "_foreach_sqrt", "_foreach_sqrt_", "_foreach_zero_",
        "_foreach_lerp_.Scalar", "_foreach_addcmul_.Scalar", "_foreach_addcdiv_.Scalar",
        "_foreach_addcdiv_.ScalarList", "_foreach_copy_", "_foreach_norm.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&simcuda::run_on_host>());
}

// --- what Python calls without tensors, through ctypes

extern "C" {
using simcuda::timeline;

void simcuda_install(void (*observer)(const char*, const char*)) {
  simcuda::observer = observer;
  c10::SetAllocator(c10::kCUDA, &simcuda::device_memory());
  at::setHostAllocator(at::kCUDA, &simcuda::pinned_memory());
  c10d::TimerRegistry()->Register(c10::kCUDA, &c10d::simulated_timer, c10::REGISTRY_PREFERRED);
}
int simcuda_devices() { return simcuda::kDevices; }
bool simcuda_is_in_use() { return at::detail::getCUDAHooks().hasCUDA(); }
int simcuda_register(const char* address, size_t size) {  // as cudaHostRegister
  std::lock_guard<std::recursive_mutex> guard(timeline().lock);
  if (simcuda::is_page_locked(address)) return 712;  // cudaErrorHostMemoryAlreadyRegistered
  simcuda::registered[address] = size;
  return 0;
}
int simcuda_unregister(const char* address) {  // as cudaHostUnregister
  std::lock_guard<std::recursive_mutex> guard(timeline().lock);
  return simcuda::registered.erase(address) ? 0 : 713;  // cudaErrorHostMemoryNotRegistered
}
int simcuda_device() { return simcuda::current_device; }
void simcuda_set_device(int device) { simcuda::current_device = static_cast<c10::DeviceIndex>(device); }
int64_t simcuda_stream(int device) { return simcuda::current_stream[device]; }
void simcuda_set_stream(int device, int64_t stream) { simcuda::current_stream[device] = stream; }
int64_t simcuda_memory(int device, bool peak) { return (peak ? timeline().peak : timeline().held)[device]; }
void simcuda_limit_memory(int device, int64_t bytes) { timeline().limit[device] = bytes; }
int64_t simcuda_shortages() { return timeline().shortages; }
int64_t simcuda_moved(bool to_device) { return to_device ? timeline().to_device : timeline().to_host; }
void simcuda_reset(bool keep_order) {
  simcuda::Locked guard(timeline().lock);
  timeline().launches.clear();
  timeline().order.clear();
  timeline().keeps_order = keep_order;
  timeline().peak = timeline().held;
  timeline().to_device = timeline().to_host = 0;
}
// Lines "number name" of launches, or the names in order; valid until the next call.
const char* simcuda_launches(bool in_order) {
  static std::string text;
  simcuda::Locked guard(timeline().lock);
  text.clear();
  for (const auto& [name, count] : timeline().launches)
    if (!in_order) text += std::to_string(count) + " " + name + "\n";
  for (const auto& name : timeline().order)
    if (in_order) text += name + "\n";
  return text.c_str();
}
}
