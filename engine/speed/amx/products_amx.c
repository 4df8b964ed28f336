/* fp32, as exact as fp32. */

#define HALF 0
#include "products_body.h"
