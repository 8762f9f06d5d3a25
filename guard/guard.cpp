// A guard on tensors at torch's dispatcher.
//
// Note [The key]
// A guarded tensor has a dispatch key of its own beside those that torch gave it. torch's dispatcher
// then brings every operator that takes the tensor to one fallback, whoever calls it: Python, C++,
// TorchScript, functorch, the autograd engine, in any thread. The fallback has the tensor's guard
// wait, and passes the call on. The tensor's class, its attributes and its address stay.
// DeferredInit is a key that torch reserves and does not use. It stands above autograd and autocast,
// so that neither has read anything yet.
//
// Note [Whose memory]
// Guards are found by the tensor's storage. A tensor that C++ makes from a guarded one without an
// operator, such as a saved variable, has the key and the storage of it: its use waits, too. A key
// without a guard behind it is left over from such a copy, and is taken off when it is met.
//
// Note [The interpreter lock]
// A guard waits in Python. A thread of C++'s own must not ask for the interpreter lock: a function that
// holds it may be waiting for this thread. There the guard waits for the events that it was given,
// notes the use, and stays. Threads that Python knows give the lock away around each operator, and
// take it back after.
//
// Note [What asks nobody]
// C++ that takes a tensor's pointer without an operator cannot be made to wait. While an update is
// under way, torch makes it raise an error with a text of ours: better that than half an update.
#include "guard.hpp"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace umem {
namespace {

constexpr auto kKey = c10::DispatchKey::DeferredInit;

struct Keys : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl* tensor) { return tensor->*(&Keys::key_set_); }
};

bool has_key(const c10::TensorImpl* tensor) { return tensor->key_set().has(kKey); }

void set_key(c10::TensorImpl* tensor, bool is_on) {
  auto& keys = Keys::of(tensor);
  keys = is_on ? keys.add(kKey) : keys.remove(kKey);
}

/// What a tensor's guards are found by: its storage, or itself if it has none.
const void* memory_of(c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return tensor;
  const void* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  return storage == nullptr ? tensor : storage;
}

/// Has an access to a storage's pointer raise, or no more; nothing in a torch that cannot.
template <typename Storage>
auto deny_pointer(Storage* storage, bool is_denied, int)
    -> decltype(storage->clear_data_ptr_access_error_msg_()) {
  if (is_denied)
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
        "umem: code past torch's operators takes the memory of a tensor whose update is under way. "
        "Call umem.join() before it, or hold the tensor with umem.hold(tensors)");
  else
    storage->clear_data_ptr_access_error_msg_();
}

template <typename Storage>
void deny_pointer(Storage*, bool, long) {}

void deny_pointer(c10::TensorImpl* tensor, bool is_denied) {
  if (tensor->has_storage())
    deny_pointer(tensor->unsafe_storage().unsafeGetStorageImpl(), is_denied, 0);
}

using Event = std::pair<int, std::uintptr_t>;  // a device's number, and a handle

class Guard {
 public:
  explicit Guard(const std::vector<std::string>& functions)
      : functions(functions.begin(), functions.end()) {}
  ~Guard() { release(); }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  void hold(
      const py::list& tensors, std::optional<std::vector<Event>> events,
      std::optional<py::list> held, bool denies_pointer);
  void release();
  void give_back(const py::list& tensors);

  /// Operators that the guard may run itself, by name.
  const std::unordered_set<std::string> functions;
  bool was_used = false;

 private:
  friend bool settle(const at::Tensor&, const c10::OperatorHandle*, torch::jit::Stack*);
  friend void allow(const py::iterable&, bool);
  void drop(const void* memory, c10::TensorImpl* tensor);

  std::unordered_map<c10::TensorImpl*, const void*> held_;  // with their memory
  bool denies_pointer() const { return denies_ || (events_ && !events_->empty()); }

  std::optional<std::vector<Event>> events_;  // none: only Python can wait
  bool denies_ = false;
};

struct Entry {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;  // its address is not used anew meanwhile
  Guard* guard;
  py::handle object;  // the guard's, in Python
};

/// Whether Python is about to free the guard, which must not get a reference again. Under Python's lock.
bool is_ending(const Entry& entry) { return Py_REFCNT(entry.object.ptr()) == 0; }

std::mutex mutex;  // of what follows, and of all guards; never held while Python runs
std::unordered_map<const void*, std::vector<Entry>> entries;

std::vector<Entry>* entries_on(const void* memory) {
  const auto found = entries.find(memory);
  return found == entries.end() ? nullptr : &found->second;
}

auto find(std::vector<Entry>& some, c10::TensorImpl* tensor) {
  return std::find_if(some.begin(), some.end(), [tensor](const Entry& entry) {
    return entry.tensor._unsafe_get_target() == tensor;
  });
}

/// The entry of a tensor; null if it has none.
const Entry* entry_of(c10::TensorImpl* tensor) {
  auto* some = entries_on(memory_of(tensor));
  if (some == nullptr) return nullptr;
  const auto entry = find(*some, tensor);
  return entry == some->end() ? nullptr : &*entry;
}

void Guard::hold(
    const py::list& tensors, std::optional<std::vector<Event>> events,
    std::optional<py::list> held, bool denies_pointer) {
  const py::handle self = py::cast(this);
  const std::lock_guard lock(mutex);
  events_ = std::move(events);
  denies_ = denies_pointer;
  was_used = false;
  for (const py::handle object : tensors) {
    auto* tensor = THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl();
    const void* memory = memory_of(tensor);
    auto& some = entries[memory];
    const auto gone = std::stable_partition(
        some.begin(), some.end(), [](const Entry& entry) { return !entry.tensor.expired(); });
    for (auto entry = gone; entry != some.end(); ++entry)
      entry->guard->held_.erase(entry->tensor._unsafe_get_target());
    some.erase(gone, some.end());
    if (find(some, tensor) != some.end()) continue;
    if (const auto known = held_.find(tensor); known != held_.end()) drop(known->second, tensor);
    auto strong = c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(tensor);
    some.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(strong), this, self});
    held_[tensor] = memory;
    set_key(tensor, true);
    if (this->denies_pointer()) deny_pointer(tensor, true);
    if (held) held->append(object);
  }
}

void Guard::drop(const void* memory, c10::TensorImpl* tensor) {
  const auto found = entries.find(memory);
  if (found == entries.end()) return;
  auto& some = found->second;
  const auto entry = find(some, tensor);
  if (entry == some.end() || entry->guard != this) return;
  if (!entry->tensor.expired()) {
    set_key(tensor, false);
    if (denies_pointer()) deny_pointer(tensor, false);
  }
  some.erase(entry);
  if (some.empty()) entries.erase(found);
}

void Guard::release() {
  const std::lock_guard lock(mutex);
  for (const auto& [tensor, memory] : held_) drop(memory, tensor);
  held_.clear();
  events_.reset();
  denies_ = false;
}

void Guard::give_back(const py::list& tensors) {
  const std::lock_guard lock(mutex);
  for (const py::handle object : tensors) {
    auto* tensor = THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl();
    const auto entry = held_.find(tensor);
    if (entry == held_.end()) continue;
    drop(entry->second, tensor);
    held_.erase(entry);
  }
}

/// The guard of a tensor; None if it has none.
py::object guard_of(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!has_key(impl)) return py::none();
  const std::lock_guard lock(mutex);
  const auto* entry = entry_of(impl);
  if (entry == nullptr || is_ending(*entry)) return py::none();
  return py::reinterpret_borrow<py::object>(entry->object);
}

/// Whether tensors are of torch's own classes, and nothing guards them.
bool are_plain(const py::iterable& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const py::handle object) {
    return THPVariable_CheckExact(object.ptr()) &&
           guard_of(THPVariable_Unpack(object.ptr())).is_none();
  });
}

/// Has torch's own operators, past guards, use tensors whose pointers are denied; or no more.
void allow(const py::iterable& tensors, bool is_allowed) {
  const std::lock_guard lock(mutex);
  for (const py::handle object : tensors) {
    auto* tensor = THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl();
    if (const auto* some = entries_on(memory_of(tensor)))
      for (const auto& entry : *some)
        if (entry.guard->denies_pointer()) deny_pointer(tensor, !is_allowed);
  }
}

/// Where tensors begin in memory, also while their pointers are denied.
std::vector<std::uintptr_t> addresses_of(const py::iterable& tensors) {
  std::vector<std::uintptr_t> addresses;
  for (const py::handle object : tensors) {
    const auto& tensor = THPVariable_Unpack(object.ptr());
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    const void* memory = storage->_mutable_data_ptr_no_checks().get();
    const auto offset = tensor.storage_offset() * tensor.itemsize();
    addresses.push_back(reinterpret_cast<std::uintptr_t>(memory) + offset);
  }
  return addresses;
}

/// Number of contexts in which this thread goes past guards. torch excludes the key for reasons of its
/// own, too: within the operators of a wrapper class.
thread_local int past_guards = 0;

/// A thread uses tensors as they are: no guard sees it, and perhaps no torch function of a subclass.
template <bool kPastSubclasses>
class Past {
  using State = at::impl::TorchFunctionDisabledState;
  using Functions = at::impl::PythonTorchFunctionTLS;

 public:
  void enter() {
    was_excluded_ = c10::impl::tls_is_dispatch_key_excluded(kKey);
    c10::impl::tls_set_dispatch_key_excluded(kKey, true);
    ++past_guards;
    state_ = Functions::get_disabled_state();
    if (kPastSubclasses && state_ == State::ENABLED)
      Functions::set_disabled_state(State::SUBCLASSES_DISABLED);
  }
  void leave() {
    Functions::set_disabled_state(state_);
    c10::impl::tls_set_dispatch_key_excluded(kKey, was_excluded_);
    --past_guards;
  }

 private:
  bool was_excluded_ = false;
  State state_ = State::ENABLED;
};
using PastGuards = Past<false>;
using Unguarded = Past<true>;

/// An argument for Python; null for one of another kind.
py::object to_python(const c10::IValue& value) {
  if (value.isNone()) return py::none();
  if (value.isTensor())
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  if (value.isInt()) return py::cast(value.toInt());
  if (value.isDouble()) return py::cast(value.toDouble());
  if (value.isBool()) return py::cast(value.toBool());
  if (!value.isList()) return {};
  py::list list;
  for (const c10::IValue& item : value.toListRef()) {
    auto object = to_python(item);
    if (!object) return {};
    list.append(std::move(object));
  }
  return list;
}

/// Has a guard run an operator. False if it does not.
bool run(const py::object& guard, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  py::list arguments;
  for (const auto& value : torch::jit::last(*stack, count)) {
    auto object = to_python(value);
    if (!object) return false;
    arguments.append(std::move(object));
  }
  const py::object result = guard.attr("run")(op.operator_name().name, arguments);
  if (result.is(py::handle(Py_NotImplemented))) return false;
  torch::jit::drop(*stack, count);
  if (op.schema().returns().empty()) return true;
  if (THPVariable_Check(result.ptr())) {
    stack->emplace_back(THPVariable_Unpack(result.ptr()));
  } else {
    c10::List<at::Tensor> tensors;
    for (const py::handle item : result) tensors.push_back(THPVariable_Unpack(item.ptr()));
    stack->emplace_back(std::move(tensors));
  }
  return true;
}

/// Lets the thread's current stream wait.
void wait_for(const Event& event) {
  const auto* device = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  const c10::Device card(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(event.first));
  device->block(reinterpret_cast<void*>(event.second), device->getStream(card));
}

/// A guard of a tensor's memory that has not been asked; null if there is none.
py::object unasked(c10::TensorImpl* tensor, const std::vector<py::object>& asked) {
  const std::lock_guard lock(mutex);
  const auto* some = entries_on(memory_of(tensor));
  if (some == nullptr) return set_key(tensor, false), py::object();
  for (const auto& entry : *some)
    // Other memory may be where that of a tensor was that is gone.
    if (!entry.tensor.expired() && !is_ending(entry) &&
        std::none_of(asked.begin(), asked.end(), [&](auto& it) { return it.is(entry.object); }))
      return py::reinterpret_borrow<py::object>(entry.object);
  return {};
}

/// Has the guards of a tensor's memory wait. True if one of them has run the operator itself.
bool settle(const at::Tensor& tensor, const c10::OperatorHandle* op, torch::jit::Stack* stack) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (PyGILState_GetThisThreadState() == nullptr) {
    const std::lock_guard lock(mutex);
    const auto* some = entries_on(memory_of(impl));
    if (some == nullptr) return set_key(impl, false), false;
    if (std::all_of(some->begin(), some->end(), [](const Entry& entry) {
          return entry.guard->events_.has_value();
        })) {
      for (const auto& entry : *some) {
        for (const auto& event : *entry.guard->events_) wait_for(event);
        entry.guard->was_used = true;
      }
      deny_pointer(impl, false);
      return false;
    }
  }
  py::gil_scoped_acquire gil;
  struct Below : PastGuards {
    Below() { enter(); }
    ~Below() { leave(); }
  } const below;
  std::vector<py::object> asked;
  while (const py::object guard = unasked(impl, asked)) {
    const auto& functions = guard.cast<const Guard&>().functions;
    if (op != nullptr && functions.count(op->operator_name().name) && run(guard, *op, stack))
      return true;
    guard.attr("use")(tensor);  // which may hand the tensor to another guard
    asked.push_back(guard);
  }
  return false;
}

bool is_guarded(const at::Tensor& tensor) {
  return tensor.defined() && has_key(tensor.unsafeGetTensorImpl());
}

/// Visits the tensors in a value that have the key.
template <typename Visit>
void for_guarded(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (is_guarded(value.toTensor())) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_guarded(item, visit);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) for_guarded(item, visit);
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) for_guarded(item.value(), visit);
  }
}

void fallback(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // A copy: a guard that runs the operator takes the arguments off the stack.
  std::vector<at::Tensor> guarded;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size()))
    for_guarded(value, [&](const at::Tensor& tensor) { guarded.push_back(tensor); });
  for (const auto& tensor : guarded)
    if (is_guarded(tensor) && settle(tensor, &op, stack)) return;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  // What was made from a tensor that is guarded still has the key, and waited already.
  for (const auto& value : torch::jit::last(*stack, op.schema().returns().size()))
    for_guarded(value, [](const at::Tensor& tensor) {
      const std::lock_guard lock(mutex);
      auto* impl = tensor.unsafeGetTensorImpl();
      if (entry_of(impl) == nullptr) set_key(impl, false);
    });
}

/// For what is no operator: waits as for one. Anything but a tensor is left alone.
void wait_for_use(const py::object& object) {
  if (!THPVariable_Check(object.ptr())) return;
  const at::Tensor tensor = THPVariable_Unpack(object.ptr());
  if (is_guarded(tensor) && past_guards == 0) settle(tensor, nullptr, nullptr);
}

/// Whether torch brings operators on a tensor with the key to the fallback.
bool probe() {
  const auto tensor = at::empty({1});
  set_key(tensor.unsafeGetTensorImpl(), true);
  tensor.alias();
  return !is_guarded(tensor);
}

template <typename Context>
void bind_context(py::module_& module, const char* name) {
  py::class_<Context>(module, name)
      .def(py::init<>())
      .def("__enter__", [](Context& self) { self.enter(); })
      .def("__exit__", [](Context& self, const py::args&) { self.leave(); });
}

}  // namespace

void bind_guard(py::module_& module) {
  // Kept to the end. Another library may have taken the key: then torch raises here.
  static auto* library =
      new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  py::class_<Guard>(module, "Guard")
      .def(py::init<const std::vector<std::string>&>())
      .def("hold", &Guard::hold)
      .def("release", &Guard::release)
      .def("give_back", &Guard::give_back)
      .def_readonly("was_used", &Guard::was_used);
  bind_context<PastGuards>(module, "PastGuards");
  bind_context<Unguarded>(module, "Unguarded");
  module.attr("KEY") = static_cast<int>(kKey);
  module.def("probe", &probe);
  module.def("guard_of", &guard_of);
  module.def("are_plain", &are_plain);
  module.def("addresses_of", &addresses_of);
  module.def("allow", &allow);
  module.def("wait_for_use", &wait_for_use);
}

}  // namespace umem
