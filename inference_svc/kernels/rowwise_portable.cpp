// The functions of each row alone on any CPU.
#include "vec_portable.h"

#include "rowwise_body.h"

namespace kev {

const RowwiseVariant ROWWISE_PORTABLE = Rowwise::variant();

}  // namespace kev
