// What Python sees of the device: `tests.rehearsal.device` answers torch.cuda's questions with it.
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "nccl.h"

namespace py = pybind11;
using namespace rehearsal;

PYBIND11_MODULE(megarl_rehearsal_device, m) {
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_current_device", [](int index) { set_current_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("memory", [](int index) {
    const Memory memory = memory_of(static_cast<c10::DeviceIndex>(index));
    return std::make_pair(memory.allocated, memory.peak);
  });
  m.def("reset_peak", [](int index) { reset_peak(static_cast<c10::DeviceIndex>(index)); });
  m.def("default_generator", [](int index) {
    const auto& generator = default_generator(static_cast<c10::DeviceIndex>(index));
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(generator));
  });
  m.def("host_view", &host_view);
  m.def("device_view", [](const Tensor& x, int index) { return device_view(x, static_cast<c10::DeviceIndex>(index)); });
  m.def("waited", [](const char* why) { waited(why, false); });
  m.def("finish_copies", &finish_copies);
  m.def("launched", [](const std::string& name) { launched(name); });
  m.def("launches", &launches);
  m.def("launch_count", &launch_count);
  m.def("wait_count", &wait_count);
  m.def("set_listener", [](size_t address) { set_listener(reinterpret_cast<Listener>(address)); });
  m.def("forget_initialisation", [] { torch::utils::set_requires_device_init(at::kCUDA, true); });
  m.def("set_sync_mode", &set_sync_mode);
  m.def("sync_mode", &sync_mode);
  m.def("define_nccl", [](py::module_ target) {  // called later: it derives from a class of torch.distributed
    py::class_<Nccl, c10::intrusive_ptr<Nccl>, c10d::Backend>(target, "RehearsalNCCL")
        .def(py::init<c10::intrusive_ptr<c10d::Backend>, const StorePtr&, int, int>());
  });
}
