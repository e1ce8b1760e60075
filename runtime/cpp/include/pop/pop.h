// Run a bundle made by `pop-export`.
//
//     const auto model = pop::Model::load("out/smollm2");
//     model.generate({5, 6, 7}, {}, [](const pop::Token& token) { std::cout << token.id << ' '; });
//
// error.h     what can go wrong, with exit codes
// manifest.h  what a bundle says about itself
// model.h     loading, generating, cancelling; conversations
#pragma once

#include "pop/error.h"
#include "pop/manifest.h"
#include "pop/model.h"
