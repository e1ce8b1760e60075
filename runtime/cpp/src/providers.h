// Which execution provider runs a bundle: the CPU's, or none.
#pragma once

#include <string>

namespace pop::internal {

// Refuses what this runtime cannot run on, so that nothing comes to rest on another provider in silence.
//
// Throws UsageError: an unknown provider, or a device that it cannot have. BackendError: a provider other than the
// CPU's (says what runs it, and how to get that).
void require_provider(const std::string& ep, int device);

}  // namespace pop::internal
