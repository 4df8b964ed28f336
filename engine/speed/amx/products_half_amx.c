/* bf16, and fp32 weights that are rounded to it. */

#define HALF 1
#include "products_body.h"
