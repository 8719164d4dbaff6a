// Handlers that XLA calls inside of a program, on its own stream: they enqueue steps and return.
//
// 04_jax.py compiles this against an exported library (python -m ep.export) and jaxlib's headers.
#include "ep.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error told(ep_status status) {
  return status == EP_OK ? ffi::Error::Success() : ffi::Error::Internal(ep_last_error());
}

// The receive rows go in and come out, donated all the way, so that XLA keeps in order what writes
// and what reads them. It may copy what it was given; it must not do that to memory of ep's.
ffi::Error in_place(ep_exchange* exchange, ffi::RemainingRets rets) {
  ep_received own = EP_RECEIVED_INIT;
  if (ep_status status = ep_rows(exchange, &own); status != EP_OK) return told(status);
  const void* rows[] = {own.x, own.scales, own.ids, own.weights};
  for (size_t index = 0; index < 4; index++) {
    auto given = rets.get<ffi::AnyBuffer>(index);
    if (!given.has_value() || (*given)->untyped_data() != rows[index]) {
      return ffi::Error::InvalidArgument("these are not ep's receive rows: donate the arguments");
    }
  }
  return ffi::Error::Success();
}

ffi::Error dispatch(ep_stream stream, int64_t handle, ffi::Buffer<ffi::BF16> x,
                    ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights, ffi::RemainingArgs,
                    ffi::RemainingRets rows) {
  auto* exchange = reinterpret_cast<ep_exchange*>(handle);
  if (ffi::Error error = in_place(exchange, rows); error.failure()) return error;
  int32_t tokens = static_cast<int32_t>(x.dimensions()[0]);
  return told(ep_dispatch(exchange, x.untyped_data(), ids.typed_data(), weights.typed_data(),
                          tokens, stream));
}

ffi::Error combine(ep_stream stream, int64_t handle, float eps, ffi::Buffer<ffi::BF16> partials,
                   ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::BF16> norm_weight,
                   ffi::RemainingArgs, ffi::Result<ffi::Buffer<ffi::BF16>> y,
                   ffi::RemainingRets rows) {
  auto* exchange = reinterpret_cast<ep_exchange*>(handle);
  if (ffi::Error error = in_place(exchange, rows); error.failure()) return error;
  int32_t tokens = static_cast<int32_t>(ids.dimensions()[0]);
  return told(ep_combine(exchange, partials.untyped_data(), ids.typed_data(),
                         norm_weight.untyped_data(), eps, y->untyped_data(), tokens, stream));
}

}  // namespace

// Not marked as fit for XLA's command buffers: those record calls one by one, and anew when an
// address changes, so that ep would see a dispatch without its combine.
XLA_FFI_DEFINE_HANDLER_SYMBOL(Dispatch, dispatch,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<ep_stream>>()
                                  .Attr<int64_t>("exchange")
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Combine, combine,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<ep_stream>>()
                                  .Attr<int64_t>("exchange")
                                  .Attr<float>("eps")
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .RemainingRets());
